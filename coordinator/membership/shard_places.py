"""The places of a job's shards: which process holds each, its lease and its command stream.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.core.wording import shards as in_words
from coordinator.membership.members import Shard, ShardSilent
from psrpc.core.errors import AlreadyExists, InvalidArgument, StaleGeneration
from psrpc.core.shard_reports import ShardFigures

STARTING_S = 3.0
"""Silence in seconds after which a shard without a command stream no longer counts as present:
three heartbeats. If it never had a stream, it holds no parameters, so its place is then free."""

FORMER = 100
"""Former holders of a shard's place that are remembered."""


class ShardPlaces:
    """A place for each of ``shards`` shards. Not thread-safe."""

    def __init__(
        self,
        shards: int,
        former: Mapping[int, Iterable[int]] | None = None,
        last: Mapping[int, int] | None = None,
    ) -> None:
        """The mappings, by index, are as an earlier coordinator of the run stored them: replaced
        (``former``) incarnations, and the ``last`` one, which may still run."""
        self.hosted = range(0)
        """The shards that workers host, as slices: all, or the last ones."""
        self.shards = [Shard(index) for index in range(shards)]
        self._former = [list((former or {}).get(index, ())) for index in range(shards)]
        self._last = [(last or {}).get(index, 0) for index in range(shards)]

    def register(
        self,
        index: int,
        incarnation: int,
        address: str,
        host: str,
        pid: int,
        now: float,
        worker: int = 0,
    ) -> bool:
        """Gives a shard process its place; returns whether the process is new there. Idempotent.
        ``worker`` is the incarnation of the worker that hosts the shard, if one does.

        A place is free when no process holds it, when the holder's command stream has ended, or
        when the holder has been silent for a lease.

        Raises:
            InvalidArgument: there is no such index.
            AlreadyExists: another process, which the message names, has the place.
            StaleGeneration: the process had the place before and was replaced.
        """
        if not 0 <= index < len(self.shards):
            count = len(self.shards) - len(self.hosted) or len(self.shards)
            raise InvalidArgument(
                f"shard index {index} is out of range: this job has {count} "
                f"shard{'s' if count > 1 else ''}, so --shard is "
                f"{'0' if count == 1 else f'0 to {count - 1}'}; "
                "see `coordinator serve --shards`",
                code="PS134",
            )
        if incarnation in self._former[index]:
            raise StaleGeneration(f"shard {index} was taken over by another process")
        shard = self.shards[index]
        new = shard.incarnation != incarnation
        if new and shard.incarnation and not self._free(shard, now):
            raise AlreadyExists(
                f"shard {index} is held by another process: {shard} (pid {shard.pid} on "
                f"{shard.host}); start this one with another --shard, or stop that one first",
                code="PS121",
            )
        if new:
            if self._last[index] not in (0, incarnation):
                self._former[index] = [*self._former[index], self._last[index]][-FORMER:]
            self._last[index] = incarnation
            shard = self.shards[index] = Shard(index)
        shard.incarnation, shard.address, shard.host, shard.pid = incarnation, address, host, pid
        shard.worker, shard.seen = worker, now
        shard.state = "ready" if shard.ready else "starting"
        return new

    def held_before(self, index: int) -> bool:
        """Whether a process has ever had this place."""
        return self._last[index] != 0

    def knows(self, index: int, incarnation: int) -> bool:
        """Returns True for a process that need not register: its place is taken, or it lost the
        place to another."""
        if not 0 <= index < len(self.shards):
            return True
        return self.shards[index].incarnation != 0 or incarnation in self._former[index]

    def ready(self, index: int, incarnation: int, version: int, now: float) -> None:
        """Notes that a shard has begun a generation at ``version``. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.ready, shard.seen, shard.state = True, now, "ready"
        shard.began_at, shard.earlier = version, None

    def watches(self, index: int, incarnation: int, now: float) -> None:
        """Notes that a shard has opened its command stream. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.watching = shard.watched = True
        self._renew(shard, now)

    def stopped_watching(self, index: int, incarnation: int) -> None:
        """Notes that a shard's newest command stream has ended."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].watching = False

    def beat(self, index: int, incarnation: int, figures: ShardFigures, now: float) -> None:
        """Records a shard's heartbeat. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        before = shard.figures
        again = before.generation == figures.generation and before.version >= shard.began_at
        shard.earlier = (shard.told, before) if again else None
        shard.figures, shard.told = figures, now
        if not again:
            shard.load.clear()
        shard.load.tell(now, figures.version, figures.gradient_nbytes)
        self._renew(shard, now)

    def seen(self, index: int, incarnation: int, now: float) -> Shard:
        """Renews the lease of a shard that called. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        self._renew(shard, now)
        return shard

    def left(self, index: int, incarnation: int) -> None:
        """Notes that a shard has heard that the job is over."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].state = "left"

    def fallen_silent(self, now: float, lease_s: float) -> list[ShardSilent]:
        """Marks and returns the shards that have been silent for longer than ``lease_s``."""
        effects: list[ShardSilent] = []
        for shard in self.shards:
            if shard.state in ("starting", "ready") and now - shard.seen > lease_s:
                shard.state = "silent"
                silence = f"{shard} has been silent for {now - shard.seen:.0f} s"
                effects.append(ShardSilent(shard.index, silence))
        return effects

    def renew_all(self, now: float) -> None:
        """Renews the lease of every shard, although none has called."""
        for shard in self.shards:
            shard.seen = now

    def present(self, now: float) -> int:
        """Counts the shards that are present or may come back shortly."""
        return sum(
            s.state in ("starting", "ready") and (s.watching or now - s.seen <= STARTING_S)
            for s in self.shards
        )

    def hoped_for(self, now: float) -> int:
        """Counts the shards that :meth:`present` counts, and silent ones with an open command
        stream: a stopped process or a swapping machine still has its parameters."""
        stopped = sum(s.state == "silent" and s.watching for s in self.shards)
        return self.present(now) + stopped

    @property
    def away(self) -> bool:
        """True if a shard is missing, silent or without its command stream, so that an operator may
        have to start it. A shard that starts or restores is present."""
        return any(
            s.state not in ("starting", "ready") or (s.ready and not s.watching)
            for s in self.shards
        )

    def waiting_for(self) -> str:
        """Says which shards are missing, starting or silent, continuing "waiting for"; empty when
        all are present."""
        missing = [s.index for s in self.shards if s.state == "missing"]
        slices = [index for index in missing if index in self.hosted]
        others = [index for index in missing if index not in self.hosted]
        parts = [f"{in_words(others)} to register"] if others else []
        if slices:
            who = "a worker" if len(slices) == 1 else f"{len(slices)} workers"
            parts += [f"{who} to host {in_words(slices, 'slice')}"]
        # A shard that watches has started, and itself waits for the others.
        parts += [f"{s} to start" for s in self.shards if s.state == "starting" and not s.watching]
        parts += [f"a sign of life of {s}" for s in self.shards if s.state == "silent"]
        parts += [f"{s} to come back" for s in self.shards if s.state == "ready" and not s.watching]
        return "; ".join(parts)

    def _free(self, shard: Shard, now: float) -> bool:
        if shard.state in ("silent", "left"):
            return True
        if shard.watched:
            return not shard.watching
        return now - shard.seen > STARTING_S

    def _shard(self, index: int, incarnation: int) -> Shard:
        if not 0 <= index < len(self.shards):
            raise InvalidArgument(f"there is no shard {index} in a job of {len(self.shards)}")
        shard = self.shards[index]
        if shard.incarnation != incarnation:
            raise StaleGeneration(
                f"shard {index} is held by another process"
                if shard.incarnation or incarnation in self._former[index]
                else f"shard {index} has not registered here"
            )
        return shard

    def _renew(self, shard: Shard, now: float) -> None:
        shard.seen = now
        if shard.state == "silent":
            shard.state = "ready" if shard.ready else "starting"
