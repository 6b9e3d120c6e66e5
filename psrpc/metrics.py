"""``/metrics`` of a process, for Prometheus.

Nothing is counted for it: the figures that a process keeps anyway are read when somebody asks, so
training does not pay for being watched. It can be read and nothing else, and tells figures and
names, never values of parameters. On loopback it is plain HTTP. Elsewhere it is HTTPS that asks for
a certificate of the job, of a role that may read it (:func:`psrpc.permissions.may_read_metrics`),
or, where there are none, nothing unless it was said to be insecure.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from psrpc.channel import check_metrics, format_address, is_loopback, parse_address
from psrpc.errors import PortInUse
from psrpc.identity import Identity, identity_of
from psrpc.logs import get_logger
from psrpc.observing import OFF
from psrpc.permissions import may_read_metrics
from psrpc.security import PLAINTEXT, Security

log = get_logger()

Family = Any
"""A ``prometheus_client.Metric`` of some kind: its name, what it means, and its samples."""

READERS = 8
"""Who is answered at the same time; the connection of one more is closed."""

IDLE_S = 5.0
"""A reader that has said nothing for so long is not waited for."""

_PEER = "psrpc.peer"
"""In the environment of a request: whoever makes it."""

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Upper bounds of the buckets of a histogram of staleness, in versions. Shards count up to 63."""


class MetricsServer:
    """Answers GET at an address of its own; as a context manager it starts and stops.

    Thread-safe. ``collect`` is called for each request, on a thread of this server.
    """

    def __init__(
        self,
        address: str,
        collect: Callable[[], Iterable[Family]],
        security: Security = PLAINTEXT,
    ) -> None:
        """Args:
        address: HOST:PORT, port 0 for any, or ``"off"``: then it does nothing.
        security: this process's.
        """
        self._asked = address
        self._collect = collect
        self._security = security
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.address = OFF
        """Where it answers once it has started."""

    def start(self) -> str:
        """Listens and answers from now on; returns the address.

        Raises:
            PortInUse: the address cannot be had.
            InvalidArgument: it is none, or others can reach it, in plaintext that was not said to
                be insecure, or with a token, which is for gRPC alone.
        """
        if self._asked == OFF:
            return OFF
        host, port = parse_address(self._asked)
        check_metrics(self._asked, self._security)
        encrypted = self._security.encrypted and not is_loopback(host)
        context = self._security.https() if encrypted else None
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Collector(self._collect))
        try:
            self._server = _Server(host, port, context)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {self._asked}: {error.strerror or error}; stop who does, or "
                "choose another --metrics HOST:PORT, or --metrics off"
            ) from None
        app: Any = make_wsgi_app(registry)
        me = self._security.identity if encrypted else None
        self._server.set_app(app if me is None else _for_readers(app, me))
        self.address = format_address(host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        return self.address

    def stop(self) -> None:
        """Answers no more."""
        if self._server is not None and self._thread is not None:
            # Or its loop would notice half a second later. Only Linux knows this of a listener.
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Family]:
        try:
            return list(self._collect())
        except Exception as error:
            log.warning("metrics could not be read", why=str(error) or type(error).__name__)
            raise

    def describe(self) -> Iterable[Family]:
        # Or it would be asked when it is registered, before there is anything to tell.
        return ()


def _for_readers(app: Any, server: Identity) -> Any:
    """``app`` for those alone who may read the metrics of ``server``."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        peer = environ[_PEER]
        if may_read_metrics(peer, server):
            found: Iterable[bytes] = app(environ, start_response)
            return found
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        who = peer or "certificate that names no role"
        return [f"a {who} may not read the metrics of a {server}\n".encode()]

    return answer


def _peer_of(connection: socket.socket) -> Identity | None:
    """Whom the certificate names that was shown on ``connection``, if it names one."""
    shown = connection.getpeercert() if isinstance(connection, ssl.SSLSocket) else None
    names: Any = (shown or {}).get("subjectAltName", ())
    uris = [name for kind, name in names if kind == "URI"]
    return identity_of(uris[0].encode()) if len(uris) == 1 else None


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def get_environ(self) -> dict[str, Any]:
        """Says who asks."""
        return {**super().get_environ(), _PEER: _peer_of(self.connection)}

    def get_stderr(self) -> io.StringIO:
        """Takes the traceback of a failure, which has been logged in a line."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: whoever reads does so every few seconds."""


class _Server(ThreadingMixIn, WSGIServer):
    """Not more threads than :data:`READERS`, whatever comes."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = READERS

    def __init__(
        self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """With a ``context``, which is asked for at each connection, it is HTTPS."""
        self._context = context
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(READERS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not that of the standard library, which asks a name server who we are.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # Here, since the thread that takes connections must not wait for a handshake.
        if self._context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(IDLE_S)
        with self._context().wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that breaks off is no affair of ours."""


def histogram(
    name: str,
    documentation: str,
    counts: Iterable[tuple[Sequence[str], Sequence[int]]],
    labels: Sequence[str],
) -> HistogramMetricFamily:
    """A histogram of staleness from counts by staleness, see ``pserver.counters``.

    Args:
        counts: label values, and how many had staleness 0, 1, 2, …; the last entry of 64 counts
            all from there on, so that the sum is a lower bound.
    """
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, found in counts:
        below = [(f"{bound:.1f}", float(sum(found[: bound + 1]))) for bound in STALENESS_BOUNDS]
        total = float(sum(staleness * count for staleness, count in enumerate(found)))
        family.add_metric(values, [*below, ("+Inf", float(sum(found)))], total)
    return family
