"""How a generation is formed: who watches, what each shard was told, who has yet to begin.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.core.wording import shards
from coordinator.core.work import Begin
from coordinator.membership.recovery import Holding


class Formation:
    """The present generation and the shards that it is formed of. Not thread-safe."""

    def __init__(self, shards: int, generation: int = 0) -> None:
        """``generation`` is the one that was stored last."""
        self.generation = generation
        self._holdings: list[Holding | None] = [None] * shards
        self._told: list[tuple[int, Begin] | None] = [None] * shards
        self._watching: set[int] = set()
        self._ready: set[int] = set()

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What the shards hold; all of them must be known."""
        found = tuple(holding for holding in self._holdings if holding is not None)
        assert len(found) == len(self._holdings)
        return found

    @property
    def due(self) -> bool:
        """Whether a generation has to be formed, and can be: every shard watches, and the present
        generation was not formed of just these processes."""
        return len(self._watching) == len(self._holdings) and not self._formed

    @property
    def complete(self) -> bool:
        """Whether every shard has begun the present generation, and is still there or may be."""
        return self._formed and len(self._ready) == len(self._holdings)

    @property
    def initialized(self) -> bool:
        """Whether every shard holds parameters."""
        return all(holding is not None and holding.initialized for holding in self._holdings)

    @property
    def joinable(self) -> int:
        """The least generation that a worker can stand at from now on: the present one, or the one
        after it as soon as a process is gone that the present one was formed of."""
        return self.generation if self._formed else self.generation + 1

    @property
    def _formed(self) -> bool:
        return all(
            holding is not None and told is not None and told[0] == holding.incarnation
            for holding, told in zip(self._holdings, self._told, strict=True)
        )

    def stands(self, shard: int, holding: Holding) -> None:
        """A shard has opened its command stream."""
        self._holdings[shard] = holding
        self._watching.add(shard)
        told = self._told[shard]
        if told is None or told[0] != holding.incarnation:
            self._ready.discard(shard)

    def absent(self, shard: int) -> None:
        """A shard's command stream has ended: it may open another, or be gone."""
        self._watching.discard(shard)

    def gone(self, shard: int) -> None:
        """A shard's place was taken by a process that does not watch yet."""
        self._holdings[shard] = None
        self._watching.discard(shard)
        self._ready.discard(shard)

    def form(self, generation: int, begins: Sequence[Begin]) -> None:
        """This generation was stored, and these orders go out."""
        assert self.due
        assert generation > self.generation
        self.generation = generation
        self._ready.clear()
        for index, (holding, begin) in enumerate(zip(self.holdings, begins, strict=True)):
            self._told[index] = (holding.incarnation, begin)

    def told(self, shard: int) -> Begin | None:
        """What the process that has the place was told, if it has not carried that out."""
        told, holding = self._told[shard], self._holdings[shard]
        if told is None or holding is None or told[0] != holding.incarnation:
            return None
        return None if shard in self._ready else told[1]

    def begun(self, shard: int, holding: Holding) -> None:
        """A shard has carried out what it was told; this is what it holds now."""
        assert holding.generation == self.generation
        self._holdings[shard] = holding
        self._ready.add(shard)

    def failed(self, shard: int) -> None:
        """A shard cannot carry out what it was told, so what it holds is of no use: another
        generation has to be formed."""
        holding = self._holdings[shard]
        if holding is not None:
            self._holdings[shard] = replace(holding, initialized=False)
        self.dissolve()

    def dissolve(self) -> None:
        """Another generation has to be formed of the same processes."""
        self._told = [None] * len(self._told)
        self._ready.clear()

    def initialize(self) -> None:
        """A worker has given every shard its parameters."""
        self._holdings = [replace(holding, initialized=True) for holding in self.holdings]

    def waiting_for(self) -> str:
        """Which shards have yet to begin, in words; empty when all have, or when the generation
        is still to be formed."""
        if not self._formed or self.complete:
            return ""
        late = [shard for shard in range(len(self._holdings)) if shard not in self._ready]
        return f"{shards(late)} to begin generation {self.generation}"
