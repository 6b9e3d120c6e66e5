"""The interface of update engines, and their optimizer state as checkpoints store it."""

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
"""The scalar of every optimizer: its steps so far, int64. Persisted name, load-bearing."""


@dataclass(frozen=True)
class Slots:
    """The optimizer state of one shard. Names are Keras's, the same in both engines.

    Attributes:
        elements: slot name -> trainable arena name -> ``[shard length]``, one value per parameter
            element in the arena's dtype and layout, so a checkpoint cuts and joins a slot by
            ``Plan.shard_slices`` like the parameters, into any number of shards. Omits arenas
            without elements on this shard. Variables without the slot (Muon keeps no velocity for
            matrices) have zeros.
        variables: slot name -> variable name -> array of its own shape (Adafactor's rows and
            columns). With whole-variable placement only; on the shard of its variable.
        scalars: name -> ``[]``, for example ``iterations``, int64. A shard without trainable
            elements has ``iterations`` alone, so a restore into another number of shards takes
            each scalar from any shard that has it.
    """

    elements: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    scalars: Mapping[str, NDArray] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """Optimizer steps so far."""
        return int(self.scalars[ITERATIONS])


class UpdateEngine(Protocol):
    """One shard's parameters, optimizer slots and their update.

    Not thread-safe: the caller holds the lock. Mappings are arena name -> this shard's elements,
    ``[shard length]`` in the arena's dtype, for trainable and state arenas; callers may omit
    arenas of length 0.
    """

    def load(self, values: Mapping[str, NDArray]) -> None:
        """Takes over ``values`` (all arenas) and resets the optimizer.

        Suitable arrays become the parameters themselves, so that a shard does not hold them twice:
        the caller must not write or read them again. Read-only ones are copied. The keras engine
        also compiles here, so that the first push does not wait for it.

        Raises:
            InvalidArgument: an arena is missing, unknown or has another length or dtype.
        """

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        """Takes one optimizer step. Trainable arenas hold gradients; state arenas hold deltas to
        add, or new values if the plan marks the arena as replaced.

        ``rate_scale``, rounded to float32, multiplies the learning rate of this step, under any
        schedule, and the weight decay where the optimizer scales that by the learning rate. With 1
        the bits are those of the optimizer alone.

        Every arena with elements must be present; an empty mapping changes nothing. Gradients of a
        float32 arena may also be bfloat16 (of ``ml_dtypes``) or float16; the engine widens them.
        Arrays are contiguous, writable and on a 64-byte boundary
        (``psrpc.core.plan.aligned_empty``). The engine does not read them after its return, so
        they may lie in memory that another process writes.

        Raises:
            InvalidArgument: an array is unsuitable, or an arena missing or unknown. The engine is
                unchanged.
        """

    def snapshot(self, encoding: Encoding = "plain") -> dict[str, NDArray]:
        """Returns read-only values of all arenas that later updates do not change.

        With ``bfloat16`` or ``float16`` the float32 trainable arenas are new arrays of that dtype,
        rounded by :func:`psrpc.core.encoding.round_to`; the others are plain.

        Plain arrays of numpy, and of keras with cut placement, are views that make the next update
        copy, so release them soon; keras with whole placement shares one array between all
        snapshots of a state.

        Raises:
            ValueError: ``int8`` and ``topk`` are for gradients only.
        """

    def slots(self) -> Slots:
        """Returns the optimizer state of :meth:`snapshot`, as consistent and read-only."""

    def load_slots(self, slots: Slots) -> None:
        """Copies ``slots``, cut for this shard, into the engine; call it after :meth:`load`.

        Raises:
            CheckpointError: the slots are of another optimizer. The engine is unchanged.
        """


def frozen(array: NDArray) -> NDArray:
    """Makes ``array`` read-only and returns it."""
    array.flags.writeable = False
    return array


def scalar(value: int | float, dtype: str) -> NDArray:
    """Makes a read-only ``[]`` array, as :class:`Slots` holds scalars."""
    return frozen(np.asarray(value, dtype))


class Lending:
    """Tracks arrays with live views. Not thread-safe, but any thread may release a view."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[NDArray]] = {}
        """``id`` of an array -> its last view."""

    def lend(self, array: NDArray) -> NDArray:
        """Returns a read-only view. While it or a part of it lives, updates write elsewhere."""
        lent = self._lent.get(id(array))
        view = None if lent is None else lent()
        if view is None:
            # Not a plain view: parts of one keep the array alive instead of the view.
            view = np.frombuffer(array.data.toreadonly(), array.dtype)
            self._lent[id(array)] = weakref.ref(view)
        return view

    def own(self, array: NDArray) -> NDArray:
        """Returns the destination of the next values of ``array``: itself, or a new uninitialised
        array while a view of it lives."""
        lent = self._lent.pop(id(array), None)
        if lent is None or lent() is None:
            return array
        return aligned_empty(len(array), array.dtype.name)

    def clear(self) -> None:
        """Forgets all arrays, which the engine no longer owns."""
        self._lent.clear()
