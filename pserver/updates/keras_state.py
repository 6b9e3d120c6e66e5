"""The state of a Keras engine in the form that checkpoints store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pserver.updates.engine import NDArray, ShardArenas, Slots
from pserver.updates.keras_objects import SlotVariables, VariablePiece, copied, view
from pserver.updates.lending import Spares


@dataclass(frozen=True)
class KerasState:
    """Reads the Keras variables of a shard for checkpoints, and restores them.

    Attributes:
        variables: the parameters, one variable per piece.
        state: state arena -> its variable.
    """

    arenas: ShardArenas
    pieces: Sequence[VariablePiece]
    variables: Sequence[Any]
    state: Mapping[str, Any]
    optimizer: SlotVariables
    spares: Spares

    def __post_init__(self) -> None:
        arrays = self.arenas.owned + self.arenas.trainable * len(self.optimizer.elements)
        self.spares.prepare((self.arenas.lengths[n], self.arenas.dtypes[n]) for n in arrays)

    def slots(self) -> Slots:
        """Returns the optimizer state, as views; as copies for arenas with several variables."""
        return self._slots(self._element)

    def _slots(self, element: Callable[[str, Sequence[Any]], NDArray]) -> Slots:
        own = self.optimizer
        return Slots(
            elements={
                slot: {n: element(n, variables) for n in self.arenas.trainable}
                for slot, variables in own.elements.items()
            },
            variables={
                slot: {
                    p.name: view(v)
                    for p, v in zip(self.pieces, variables, strict=True)
                    if v is not None
                }
                for slot, variables in own.variables.items()
            },
            scalars={name: view(v) for name, v in own.scalars.items()},
        )

    def freeze(self) -> tuple[dict[str, NDArray], Slots]:
        """Returns all arenas and the optimizer state as copies, in memory that was written before.

        Views would be slower: while they exist, updates write to other memory of TensorFlow, which
        may be new each time."""
        values = {n: self._copy(n, self.variables) for n in self.arenas.trainable}
        for name, variable in self.state.items():
            array = self._spare(name)
            np.copyto(array, view(variable))
            values[name] = self.spares.lend(array)
        return self.arenas.ordered(values, "plain"), self._slots(self._copy)

    def load(self, slots: Slots) -> None:
        """Copies ``slots``, which have been checked, to the variables."""
        own = self.optimizer
        for slot, variables in own.elements.items():
            for p, v in zip(self.pieces, variables, strict=True):
                if v is not None:
                    v.assign(copied(slots.elements[slot][p.arena][p.place].reshape(p.shape)))
        for slot, variables in own.variables.items():
            for p, v in zip(self.pieces, variables, strict=True):
                if v is not None:
                    v.assign(copied(slots.variables[slot][p.name]))
        for name, variable in own.scalars.items():
            variable.assign(copied(slots.scalars[name]))

    def _element(self, arena: str, variables: Sequence[Any]) -> NDArray:
        parts = [v for p, v in zip(self.pieces, variables, strict=True) if p.arena == arena]
        if len(parts) > 1 or parts[0] is None:
            return self._copy(arena, variables)
        return view(parts[0]).reshape(-1)

    def _copy(self, arena: str, variables: Sequence[Any]) -> NDArray:
        """Copies the variables of ``arena`` to one ``[shard length]`` array, with zeros for
        None."""
        array = self._spare(arena)
        for p, v in zip(self.pieces, variables, strict=True):
            if p.arena == arena:
                array[p.place] = 0 if v is None else view(v).reshape(-1)
        return self.spares.lend(array)

    def _spare(self, arena: str) -> NDArray:
        return self.spares.take(self.arenas.lengths[arena], self.arenas.dtypes[arena])
