"""Calls without a network, as fuzzed servicers see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

MOST_CALLS = 8
"""Of one input."""


class Caller:
    """The context of a call: here one without a certificate, whose deadline is now."""

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float:
        return 0.0

    def add_callback(self, _callback: Callable[[], object]) -> bool:
        return True

    def cancel(self) -> None:
        """As gRPC's."""


def split(data: bytes) -> Iterator[tuple[int, bytes]]:
    """An input's parts: a byte that says what kind, two with the length, and the rest."""
    at = 0
    for _ in range(MOST_CALLS):
        if at >= len(data):
            return
        nbytes = int.from_bytes(data[at + 1 : at + 3], "little")
        yield data[at], data[at + 3 : at + 3 + nbytes]
        at += 3 + nbytes


def joined(parts: Iterable[tuple[int, bytes]]) -> bytes:
    """The inverse of :func:`split`."""
    return b"".join(bytes([kind]) + len(part).to_bytes(2, "little") + part for kind, part in parts)
