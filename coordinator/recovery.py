"""Where shards begin: at the start, after a loss, after the coordinator itself was lost.

Every shard says what it holds when it opens its command stream. Once all do, and one of them is
new here, a generation is formed: each is told to keep what it holds, to restore a checkpoint, or
to hold nothing. See ``docs/design/0008-recovery.md``.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.work import Begin, Decision
from psrpc.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Holding:
    """What a shard holds: parameters of ``version`` if it is ``initialized``, as they became in
    ``generation``."""

    incarnation: int
    generation: int = 0
    initialized: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where all shards begin, and why there."""

    begins: tuple[Begin, ...]
    reason: str


def choose_origin(
    holdings: Sequence[Holding],
    mode: Literal["async", "sync"],
    generation: int,
    policy: int,
    *,
    decision: Decision | None,
    checkpoint: str | None,
    committed: bool,
) -> Origin:
    """What each shard is told, by index.

    Args:
        generation: the one that is formed.
        decision: the newest that was stored; it may have reached some shards and others not.
        checkpoint: the newest good one, relative to the run directory; None if there is none.
        committed: whether this run has ever committed a checkpoint. Training begins only after the
            first, so without any there is nothing to lose.

    Raises:
        CheckpointError: parameters were lost, and no checkpoint is left that is good.
    """
    lacking = [index for index, holding in enumerate(holdings) if not holding.initialized]
    everyone = range(len(holdings))
    names = ", ".join(map(str, lacking))
    if lacking and checkpoint is None:
        if committed:
            raise CheckpointError(
                f"shard {names} holds no parameters, and no checkpoint of this run is good"
            )
        fresh = tuple(Begin(generation, policy) for _ in everyone)
        return Origin(fresh, "no checkpoint was ever committed: a worker initializes all shards")
    if mode == "async":
        begins = tuple(
            Begin(generation, policy, restore=checkpoint or "")
            if index in lacking
            else Begin(generation, policy, keep=True)
            for index in everyone
        )
        what = f"shard {names} restores {checkpoint}" if lacking else "all shards keep theirs"
        return Origin(begins, what)
    apart = "" if lacking else _apart(holdings, decision)
    if not lacking and not apart:
        keep = Begin(generation, policy, keep=True, decision=decision)
        return Origin(tuple(keep for _ in everyone), "all shards keep theirs")
    if checkpoint is None:
        raise CheckpointError(f"{apart}, and no checkpoint of this run is good")
    restore = Begin(generation, policy, restore=checkpoint)
    lost = f"shard {names} holds no parameters" if lacking else apart
    return Origin(tuple(restore for _ in everyone), f"{lost}: all shards restore {checkpoint}")


def _apart(holdings: Sequence[Holding], decision: Decision | None) -> str:
    """Why shards that all hold parameters cannot stand at one round; empty if they can."""
    generations = {holding.generation for holding in holdings}
    if len(generations) > 1:
        return f"the shards stand at generations {sorted(generations)}"
    versions = {holding.version for holding in holdings}
    if len(versions) == 1 and decision is None:
        return ""
    reach = set() if decision is None else {decision.round, decision.round + 1}
    if decision is None or decision.generation not in generations:
        return "" if len(versions) == 1 else f"the shards stand at rounds {sorted(versions)}"
    return "" if versions <= reach else f"the shards stand at rounds {sorted(versions)}"


class Formation:
    """Who watches, which generation stands, and who has yet to begin. Not thread-safe."""

    def __init__(self, shards: int) -> None:
        self.generation = 0
        """The generation that was formed last; 0 before the first of this coordinator."""
        self._holdings: list[Holding | None] = [None] * shards
        self._told: list[tuple[int, Begin] | None] = [None] * shards
        self._ready: set[int] = set()

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What the shards hold; all of them must be known."""
        found = [holding for holding in self._holdings if holding is not None]
        assert len(found) == len(self._holdings)
        return tuple(found)

    @property
    def due(self) -> bool:
        """Whether a generation has to be formed, and can be: all shards watch, and not all of them
        are those that the present generation was formed of."""
        return (
            all(holding is not None for holding in self._holdings)
            and not self.formed_of_those_present
        )

    @property
    def formed_of_those_present(self) -> bool:
        """Whether the present generation was formed of the processes that hold the places now."""
        return all(
            holding is not None and told is not None and told[0] == holding.incarnation
            for holding, told in zip(self._holdings, self._told, strict=True)
        )

    @property
    def complete(self) -> bool:
        """Whether every shard has begun."""
        return self.generation > 0 and len(self._ready) == len(self._holdings)

    def stands(self, shard: int, holding: Holding) -> None:
        """A shard has opened its command stream."""
        self._holdings[shard] = holding
        told = self._told[shard]
        if told is None or told[0] != holding.incarnation:
            self._ready.discard(shard)

    def gone(self, shard: int) -> None:
        """A shard's place was taken by a process that does not watch yet."""
        self._holdings[shard] = None
        self._ready.discard(shard)

    def form(self, generation: int, begins: Sequence[Begin]) -> None:
        """This generation was stored, and these orders go out."""
        assert self.due
        assert generation > self.generation
        self.generation = generation
        self._ready.clear()
        for index, (holding, begin) in enumerate(zip(self.holdings, begins, strict=True)):
            self._told[index] = (holding.incarnation, begin)

    def begun(self, shard: int, holding: Holding) -> None:
        """A shard has carried its order out; this is what it holds now."""
        self._holdings[shard] = holding
        if holding.generation == self.generation:
            self._ready.add(shard)

    def failed(self) -> None:
        """A shard cannot carry its order out: another generation has to be formed."""
        self._told = [None] * len(self._told)
        self._ready.clear()

    def initialized(self) -> None:
        """A worker has given every shard its parameters."""
        self._holdings = [
            Holding(holding.incarnation, holding.generation, True, holding.version)
            for holding in self.holdings
        ]

    def order_for(self, shard: int, holding: Holding) -> Begin | None:
        """What a shard that watches may have missed."""
        told = self._told[shard]
        if told is None or told[0] != holding.incarnation:
            return None
        return told[1] if holding.generation < self.generation or shard not in self._ready else None

    def waiting_for(self) -> str:
        """Which shards have yet to begin, in words; empty when all have."""
        if self.generation == 0 or self.complete:
            return ""
        late = [str(k) for k in range(len(self._holdings)) if k not in self._ready]
        return f"shard {', '.join(late)} to begin generation {self.generation}"
