"""Forms a generation: which shards watch, the order of each, and which have yet to begin.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.core.wording import shards
from psrpc.core.commands import Begin
from psrpc.core.shard_reports import HeldState


class Formation:
    """The present generation and the shards that it is formed of. Not thread-safe."""

    def __init__(self, shards: int, generation: int = 0) -> None:
        """``generation`` is the one that was stored last."""
        self.generation = generation
        self._holdings: list[HeldState | None] = [None] * shards
        self._told: list[tuple[int, Begin] | None] = [None] * shards
        self._watching: set[int] = set()
        self._ready: set[int] = set()
        # Cached, since every call of a worker reads them.
        self._formed = self._initialized = False

    @property
    def holdings(self) -> tuple[HeldState, ...]:
        """The holdings of all shards, which must be known."""
        holdings = tuple(holding for holding in self._holdings if holding is not None)
        assert len(holdings) == len(self._holdings)
        return holdings

    @property
    def due(self) -> bool:
        """Whether a generation must and can be formed: every shard watches, and the present
        generation was not formed of just these processes."""
        return len(self._watching) == len(self._holdings) and not self._formed

    @property
    def complete(self) -> bool:
        """Whether every shard has begun the present generation, and may still be present."""
        return self._formed and len(self._ready) == len(self._holdings)

    @property
    def initialized(self) -> bool:
        """Whether every shard holds parameters."""
        return self._initialized

    @property
    def joinable(self) -> int:
        """The least generation that a worker can join: the present one, or the next as soon as a
        process that formed the present one is gone."""
        return self.generation if self._formed else self.generation + 1

    def _judge(self) -> None:
        """Updates the cached results after a change of holdings or orders."""
        self._formed = all(
            holding is not None and told is not None and told[0] == holding.incarnation
            for holding, told in zip(self._holdings, self._told, strict=True)
        )
        self._initialized = all(
            holding is not None and holding.initialized for holding in self._holdings
        )

    def stands(self, shard: int, holding: HeldState) -> None:
        """Notes that a shard has opened its command stream, and the state that it holds."""
        self._holdings[shard] = holding
        self._watching.add(shard)
        told = self._told[shard]
        if told is None or told[0] != holding.incarnation:
            self._ready.discard(shard)
        self._judge()

    def absent(self, shard: int) -> None:
        """Notes that a shard's command stream has ended: it may open another, or be gone."""
        self._watching.discard(shard)

    def gone(self, shard: int) -> None:
        """Notes that a process that does not watch yet took a shard's place."""
        self._holdings[shard] = None
        self._watching.discard(shard)
        self._ready.discard(shard)
        self._judge()

    def form(self, generation: int, begins: Sequence[Begin]) -> None:
        """Forms the generation, which is stored already, with these orders by shard."""
        assert self.due
        assert generation > self.generation
        self.generation = generation
        self._ready.clear()
        for index, (holding, begin) in enumerate(zip(self.holdings, begins, strict=True)):
            self._told[index] = (holding.incarnation, begin)
        self._judge()

    def told(self, shard: int) -> Begin | None:
        """Returns the order that the shard's present process has yet to carry out, or None."""
        told, holding = self._told[shard], self._holdings[shard]
        if told is None or holding is None or told[0] != holding.incarnation:
            return None
        return None if shard in self._ready else told[1]

    def begun(self, shard: int, holding: HeldState) -> None:
        """Notes that a shard has carried out its order, and the state that it holds now."""
        assert holding.generation == self.generation
        self._holdings[shard] = holding
        self._ready.add(shard)
        self._judge()

    def failed(self, shard: int) -> None:
        """Notes that a shard cannot carry out its order, so that its state is useless and another
        generation must be formed."""
        holding = self._holdings[shard]
        if holding is not None:
            self._holdings[shard] = replace(holding, initialized=False)
        self.dissolve()

    def dissolve(self) -> None:
        """Requires another generation of the same processes."""
        self._told = [None] * len(self._told)
        self._ready.clear()
        self._judge()

    def stood(self, versions: Sequence[int]) -> None:
        """Notes the versions of all shards, by index."""
        self._holdings = [
            replace(holding, version=version)
            for holding, version in zip(self.holdings, versions, strict=True)
        ]

    def initialize(self) -> None:
        """Notes that a worker has initialized every shard."""
        self._holdings = [replace(holding, initialized=True) for holding in self.holdings]
        self._judge()

    def waiting_for(self) -> str:
        """Says which shards have yet to begin; empty when all have, or before the generation is
        formed."""
        if not self._formed or self.complete:
            return ""
        late = [shard for shard in range(len(self._holdings)) if shard not in self._ready]
        return f"{shards(late)} to begin generation {self.generation}"
