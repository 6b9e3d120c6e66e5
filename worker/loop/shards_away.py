"""How long a worker waits for shards that are away."""

from __future__ import annotations

from psrpc.core.errors import Forming, NotReady, ShardUnreachable


class ShardsAway:
    """The wait of one worker for all shards, which ends after ``patience_s`` with a shard away. The
    time in which all are there, and begin or read a checkpoint, does not count."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def answered(self, error: NotReady, now: float) -> None:
        """Judges an answer of the coordinator. Raises ShardUnreachable if the wait is over."""
        if isinstance(error, Forming):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= self._patience_s:
            raise ShardUnreachable(
                f"shards have been away for {now - self._since:.0f} s: {error}; "
                "start the missing shards, or allow more time with --connect-timeout S"
            ) from None
