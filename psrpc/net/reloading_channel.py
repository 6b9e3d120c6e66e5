"""A TLS channel that picks up replaced certificates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc


class SecureChannel(grpc.Channel):
    """Forwards calls to a channel from ``connect``, and to a new one when the credential files have
    changed. Thread-safe.

    It is needed because gRPC's own channels keep their first credentials. Calls in flight stay on
    their channel; that is closed when the files change once more.
    """

    def __init__(self, connect: Callable[[], grpc.Channel], stamp: Callable[[], object]) -> None:
        """``connect`` makes a channel from the present files. ``stamp()`` returns another value
        after they have changed."""
        self._connect = connect
        self._stamp = stamp
        self._lock = threading.Lock()
        self._made_of = stamp()
        self._channel = connect()
        self._before: grpc.Channel | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self.close()
        return None

    def current(self) -> grpc.Channel:
        """Returns the channel for new calls."""
        stamp = self._stamp()
        with self._lock:
            if stamp == self._made_of or self._closed:
                return self._channel
            if self._before is not None:
                self._before.close()
            self._before = self._channel
            self._channel = self._connect()
            self._made_of = stamp
            return self._channel

    def close(self) -> None:
        """Closes all connections; calls in flight fail."""
        with self._lock:
            self._closed = True
            self._channel.close()
            if self._before is not None:
                self._before.close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """See grpc.Channel."""
        self.current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self.current().unsubscribe(callback)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return _MultiCallable(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return _MultiCallable(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return _MultiCallable(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return _MultiCallable(self, "stream_stream", args, options)


class _MultiCallable:
    """One method on the current channel."""

    def __init__(
        self, channel: SecureChannel, kind: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind, self._args, self._options = kind, args, options
        self._made: tuple[grpc.Channel, Any] | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._now()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def _now(self) -> Any:
        channel = self._channel.current()
        made = self._made
        if made is None or made[0] is not channel:
            made = (channel, getattr(channel, self._kind)(*self._args, **self._options))
            self._made = made
        return made[1]
