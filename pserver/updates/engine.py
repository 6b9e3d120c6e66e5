"""The interface of update engines, the arenas that they update, and their optimizer state in the
form that checkpoints store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from psrpc.core.encoding import Encoding, wire_dtype
from psrpc.core.errors import CheckpointError, InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES, Plan

NDArray = npt.NDArray[Any]
EngineKind = Literal["keras", "numpy"]

ITERATIONS = "iterations"
"""Name of the scalar that every optimizer has: its number of steps so far, int64. Persisted name,
load-bearing."""


@dataclass(frozen=True)
class Slots:
    """The optimizer state of one shard. Both engines use the names of Keras.

    Attributes:
        elements: slot name -> trainable arena name -> ``[shard length]``, one value per parameter
            element, in the arena's dtype and layout. So a checkpoint can cut and join a slot by
            ``Plan.shard_slices`` like the parameters, into any number of shards. Omits arenas
            without elements on this shard. Variables that do not have the slot get zeros (Muon
            keeps no velocity for matrices).
        variables: slot name -> variable name -> array of a shape of its own (Adafactor's rows and
            columns). Only with whole-variable placement, and only on the shard that has the
            variable.
        scalars: name -> ``[]``, for example ``iterations``, int64. A shard without trainable
            elements has only ``iterations``; so a restore into another number of shards must take
            each scalar from a shard that has it.
    """

    elements: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    scalars: Mapping[str, NDArray] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """Number of optimizer steps so far."""
        return int(self.scalars[ITERATIONS])


class UpdateEngine(Protocol):
    """Owns one shard's parameters and optimizer slots, and updates them.

    Not thread-safe: the caller holds the lock. Mappings are arena name -> this shard's elements,
    ``[shard length]`` in the arena's dtype, for trainable and state arenas; callers may omit arenas
    of length 0.
    """

    def load(self, values: Mapping[str, NDArray]) -> None:
        """Takes over ``values`` (all arenas) and resets the optimizer.

        Suitable arrays become the parameters themselves, so that a shard does not hold them twice;
        the caller must not write or read them again. Read-only arrays are copied. The keras engine
        also compiles its functions here, so that the first push does not wait for that.

        Raises:
            InvalidArgument: an arena is missing, unknown or has another length or dtype.
        """

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        """Takes one optimizer step. Trainable arenas hold gradients; state arenas hold deltas to
        add, or new values if the plan marks the arena as replaced.

        ``rate_scale`` multiplies the learning rate of this step, whatever the schedule is. It also
        multiplies the weight decay if the optimizer scales that by the learning rate. The Keras
        engine rounds ``rate_scale`` to float32. With 1 the result has exactly the bits that the
        optimizer alone computes.

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

        Plain arrays of the numpy engine, and of the keras engine with cut placement, are views.
        While they exist the next update has to copy, so release them soon. With whole placement the
        keras engine shares one array among all snapshots of a state.

        Raises:
            ValueError: ``int8`` and ``topk`` are for gradients only.
        """

    def slots(self) -> Slots:
        """Returns the present optimizer state, read-only; later updates do not change it."""

    def freeze(self) -> tuple[dict[str, NDArray], Slots]:
        """Returns the results of :meth:`snapshot` and :meth:`slots` for a checkpoint, which keeps
        them for long.

        Uses memory that was written before, which is faster than new memory, provided that ``load``
        was some time ago and the previous result has been released."""

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
    """Makes a read-only ``[]`` array, the form of scalars in :class:`Slots`."""
    return frozen(np.asarray(value, dtype))


_FLOAT32_OR_HALF = tuple(wire_dtype(e, "float32") for e in ("plain", "bfloat16", "float16"))


class ShardArenas:
    """The arenas of ``plan`` on one shard, and checks of arrays for them. Immutable.

    Attributes:
        lengths: arena name -> number of elements on this shard, including arenas with 0.
        dtypes: arena name -> dtype.
        trainable, state: names of the arenas of that role with at least one element.
        replaced: names of the state arenas for which an update brings new values instead of deltas.
        owned: ``trainable + state``.
        encodable: names of the arenas, empty ones included, that may be encoded on the wire.
    """

    def __init__(self, plan: Plan, shard: int) -> None:
        self.lengths = {a.name: a.shard_length(shard) for a in plan.arenas}
        self.dtypes = {a.name: a.dtype for a in plan.arenas}
        owned = [a for a in plan.arenas if a.shard_length(shard)]
        self.trainable = tuple(a.name for a in owned if a.role == "trainable")
        self.state = tuple(a.name for a in owned if a.role == "state")
        self.replaced = tuple(a.name for a in owned if a.replaced)
        self.owned = self.trainable + self.state
        self.encodable = frozenset(a.name for a in plan.arenas if a.encodable)
        self._own = {n: (np.dtype(dtype),) for n, dtype in self.dtypes.items()}
        self._gradients = self._own | dict.fromkeys(self.encodable, _FLOAT32_OR_HALF)

    def check(self, arrays: Mapping[str, NDArray]) -> None:
        """Checks that there is one array per owned arena, of its length and dtype.

        Raises:
            InvalidArgument: names the arena, the actual and the expected array.
        """
        self._check(arrays, self._own)

    def check_gradients(self, arrays: Mapping[str, NDArray]) -> None:
        """Does the checks of :meth:`check`, but allows bfloat16 and float16 for encodable arenas,
        too."""
        self._check(arrays, self._gradients)

    def _check(
        self, arrays: Mapping[str, NDArray], dtypes: Mapping[str, tuple[np.dtype[Any], ...]]
    ) -> None:
        for name in self.owned:
            if name not in arrays:
                raise InvalidArgument(f"arena {name} is missing; got {', '.join(arrays) or 'none'}")
        for name, array in arrays.items():
            if name not in self.lengths:
                raise InvalidArgument(
                    f"arena {name!r} is unknown; this shard has {', '.join(self.lengths)}"
                )
            length = self.lengths[name]
            if array.shape != (length,) or array.dtype not in dtypes[name]:
                plain, *others = dtypes[name]
                raise InvalidArgument(
                    f"arena {name} got {array.dtype}{list(array.shape)}; expected"
                    f" {plain}[{length}]{''.join(f' or {other}' for other in others)}"
                )

    def check_aligned(self, arrays: Mapping[str, NDArray]) -> None:
        """Checks that TensorFlow can use the arrays, since it aborts the process if an array is
        unaligned.

        Raises:
            InvalidArgument: names the arena and what is wrong with the array.
        """
        for name in self.owned:
            array = arrays[name]
            if array.ctypes.data % ALIGNMENT_BYTES:
                raise InvalidArgument(
                    f"arena {name}: the array is not on a {ALIGNMENT_BYTES}-byte boundary; "
                    "use psrpc.core.plan.aligned_empty"
                )
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise InvalidArgument(f"arena {name}: the array is not contiguous and writable")

    def wire_dtype(self, name: str, encoding: Encoding) -> np.dtype[Any]:
        """Returns the dtype of arena ``name`` in a snapshot of ``encoding``."""
        return wire_dtype(encoding if name in self.encodable else "plain", self.dtypes[name])

    def ordered(self, owned: Mapping[str, NDArray], encoding: Encoding) -> dict[str, NDArray]:
        """Returns all arenas in the plan's order: ``owned``, and empty arrays for the others."""
        return {
            n: owned[n] if n in owned else np.empty(0, self.wire_dtype(n, encoding))
            for n in self.lengths
        }

    def check_slots(self, given: Slots, own: Slots, what: str) -> None:
        """Checks that slots ``given`` have the names, shapes and dtypes of ``own``.

        Ignores empty arrays. On a shard without trainable elements, ignores everything except
        ``iterations``.

        Raises:
            CheckpointError: names ``what`` (the optimizer) and the difference.
        """
        have, need = _signature(given), _signature(own)
        if not self.trainable:
            have = {k: v for k, v in have.items() if k == ITERATIONS}
        if have == need:
            return
        missing = [k for k in need if k not in have]
        unknown = [k for k in have if k not in need]
        other = [
            f"{k} is {have[k]}, expected {need[k]}" for k in need if have.get(k, need[k]) != need[k]
        ]
        groups = (("missing", missing), ("unknown", unknown))
        parts = [f"{kind} {', '.join(names)}" for kind, names in groups if names]
        raise CheckpointError(
            f"the optimizer slots do not fit {what}: {'; '.join(parts + other)}; "
            "resume with the optimizer that wrote them"
        )


def _signature(slots: Slots) -> dict[str, str]:
    arrays = {
        f"{slot}/{place}": array
        for group in (slots.elements, slots.variables)
        for slot, places in group.items()
        for place, array in places.items()
        if array.size
    } | dict(slots.scalars)
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
