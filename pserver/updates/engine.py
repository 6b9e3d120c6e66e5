"""The interface of update engines, and the optimizer state that a checkpoint takes from one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from psrpc.core.encoding import Encoding
from psrpc.core.plan import aligned_empty

NDArray = npt.NDArray[Any]
EngineKind = Literal["keras", "numpy"]

ITERATIONS = "iterations"
"""The scalar every optimizer has: optimizer steps taken, int64. Persisted name, load-bearing."""


@dataclass(frozen=True)
class Slots:
    """The optimizer state of one shard. Names are Keras's, the same in both engines.

    Attributes:
        elements: slot name -> trainable arena name -> ``[shard length]``, one value per parameter
            element in the arena's dtype. Laid out like the arena itself, so a checkpoint cuts and
            joins a slot by ``Plan.shard_slices`` exactly as it does the parameters, into any
            number of shards. Arenas of which the shard owns nothing are left out. Elements of
            variables that lack the slot (Muon keeps no velocity for matrices) are 0.
        variables: slot name -> variable name -> array of a shape of its own (Adafactor's rows and
            columns). Occurs with whole-variable placement only; goes with its variable.
        scalars: name -> ``[]``, for example ``iterations``, int64. A shard that owns no trainable
            element has ``iterations`` alone, so a restore into another number of shards takes
            each scalar from any shard that has it.
    """

    elements: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    scalars: Mapping[str, NDArray] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """Optimizer steps taken so far."""
        return int(self.scalars[ITERATIONS])


class UpdateEngine(Protocol):
    """One shard's parameters, optimizer slots and the update.

    Not thread-safe: the caller holds the lock. Arrays are keyed by arena name and hold this
    shard's elements, ``[shard length]`` in the arena's dtype, for trainable and state arenas
    alike; the length may be 0, and such an arena may be left out of what is passed in.
    """

    def load(self, values: Mapping[str, NDArray]) -> None:
        """Takes over ``values`` (all arenas) and starts the optimizer afresh.

        Arrays that fit become the parameters themselves, so a shard need not hold them twice: the
        caller may neither write to them nor read them again. Those that are read-only are copied.
        The keras engine also compiles here, so that the first push does not wait for it.

        Raises:
            InvalidArgument: an arena is missing, unknown or has another length or dtype.
        """

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        """One optimizer step: trainable arenas hold gradients, state arenas deltas to be added, or
        new values where the plan says that the arena is replaced.

        ``rate_scale`` multiplies the learning rate of this step, whatever schedule it has; where
        the optimizer decays weights by the learning rate, that too. With 1 the bits are those of
        the optimizer alone. It is rounded to float32, as learning rates are.

        Every arena with elements must be there; an empty mapping changes nothing. Gradients of a
        float32 arena may also be bfloat16 (of ``ml_dtypes``) or float16; they are widened on the
        way. Arrays are contiguous, writable, on a 64-byte boundary
        (``psrpc.core.plan.aligned_empty``) and belong to the caller again on return: nothing looks
        at them any more, so they may lie in memory that another process writes.

        Raises:
            InvalidArgument: an array is none of that, or an arena is missing or unknown. Nothing
                was changed.
        """

    def snapshot(self, encoding: Encoding = "plain") -> dict[str, NDArray]:
        """Read-only values of all arenas that later updates do not change.

        With ``bfloat16`` or ``float16`` the float32 trainable arenas are new arrays of that dtype,
        rounded as :func:`psrpc.core.encoding.round_to` does; the others are as always.

        numpy, and keras with cut placement: a view that makes the next update copy (let it go
        soon); keras with whole placement: an array shared by all snapshots of one state.

        Raises:
            ValueError: ``int8`` and ``topk`` are for gradients.
        """

    def slots(self) -> Slots:
        """The optimizer state that belongs to :meth:`snapshot`, as consistent and read-only."""

    def load_slots(self, slots: Slots) -> None:
        """Takes a copy of ``slots``, cut for this shard; comes after :meth:`load`.

        Raises:
            CheckpointError: the slots are another optimizer's. Nothing was changed.
        """


def frozen(array: NDArray) -> NDArray:
    """``array`` itself, made read-only."""
    array.flags.writeable = False
    return array


def scalar(value: int | float, dtype: str) -> NDArray:
    """A ``[]`` array, the form scalars have in :class:`Slots`."""
    return frozen(np.asarray(value, dtype))


class Lending:
    """Which arrays somebody still reads. Not thread-safe, but readers may let go on any thread."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[NDArray]] = {}
        """By ``id`` of an array: the last view of it that was given away."""

    def lend(self, array: NDArray) -> NDArray:
        """A read-only view. As long as it lives, or a part of it, updates write elsewhere."""
        lent = self._lent.get(id(array))
        view = None if lent is None else lent()
        if view is None:
            # Not a plain view: parts of one would keep the array alive and not the view.
            view = np.frombuffer(array.data.toreadonly(), array.dtype)
            self._lent[id(array)] = weakref.ref(view)
        return view

    def own(self, array: NDArray) -> NDArray:
        """Where the next values of ``array`` go: into it, or, while somebody still reads it, into
        a new one, uninitialised."""
        lent = self._lent.pop(id(array), None)
        if lent is None or lent() is None:
            return array
        return aligned_empty(len(array), array.dtype.name)

    def clear(self) -> None:
        """Others own the arrays from now on."""
        self._lent.clear()
