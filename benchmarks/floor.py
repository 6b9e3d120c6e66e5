"""Lower bound for parameter servers on this machine: moving the bytes, and nothing else."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

REPETITIONS = 15
WARMUP = 3


def memcpy_ms(nbytes: int) -> float:
    """Copies ``nbytes`` from one array to another and back; milliseconds, median."""
    there, back = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def copy() -> None:
        np.copyto(back, there)
        np.copyto(there, back)

    return _median_ms(copy)


def loopback_ms(nbytes: int) -> float:
    """Sends ``nbytes`` through a TCP connection on this host, waits until they have arrived, and
    receives as many; milliseconds, median."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = threading.Thread(target=_echo, args=(listener, nbytes))
        echo.start()
        with socket.create_connection(listener.getsockname()) as here:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = memoryview(bytearray(nbytes))

            def there_and_back() -> None:
                here.sendall(data)
                _receive(here, data)

            result = _median_ms(there_and_back)
        echo.join()
    return result


def _echo(listener: socket.socket, nbytes: int) -> None:
    """Sends back whatever came, whole, until the other side closes."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytearray(nbytes))
        while _receive(connection, data):
            connection.sendall(data)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills ``into``; False when the other side has closed."""
    place = 0
    while place < len(into):
        count = connection.recv_into(into[place:])
        if not count:
            return False
        place += count
    return True


def _median_ms(step: Callable[[], None]) -> float:
    times = []
    for _ in range(WARMUP + REPETITIONS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARMUP:]) * 1e3
