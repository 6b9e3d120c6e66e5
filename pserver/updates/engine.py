"""The interface of update engines, the arenas they update, and their optimizer state as checkpoints
store it."""

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

        ``rate_scale`` multiplies the learning rate of this step, under any schedule, and the weight
        decay where the optimizer scales that by the learning rate; the Keras engine rounds it to
        float32. With 1 the bits are those of the optimizer alone.

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

    def freeze(self) -> tuple[dict[str, NDArray], Slots]:
        """Returns what :meth:`snapshot` and :meth:`slots` do, for a checkpoint, which holds it for
        long. It needs no memory that was not touched before, once ``load`` is some time ago and
        if the last such state has been released."""

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


_FLOAT32_OR_HALF = tuple(wire_dtype(e, "float32") for e in ("plain", "bfloat16", "float16"))


class ShardArenas:
    """The arenas of ``shard`` of ``plan``. Immutable.

    Attributes:
        lengths: arena name -> elements on this shard, 0 included.
        dtypes: arena name -> dtype.
        trainable, state: names of the arenas of that role with at least one element.
        replaced: those of ``state`` for which an update brings new values instead of deltas.
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
        """Checks as :meth:`check`, but encodable arenas may also be bfloat16 or float16."""
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
        """Checks that TensorFlow may use the arrays; it aborts the process at an unaligned one.

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
        """Returns the dtype of an arena in a snapshot of ``encoding``."""
        return wire_dtype(encoding if name in self.encodable else "plain", self.dtypes[name])

    def ordered(self, owned: Mapping[str, NDArray], encoding: Encoding) -> dict[str, NDArray]:
        """Returns all arenas in the plan's order: ``owned``, and empty arrays for the others."""
        return {
            n: owned[n] if n in owned else np.empty(0, self.wire_dtype(n, encoding))
            for n in self.lengths
        }

    def check_slots(self, given: Slots, own: Slots, what: str) -> None:
        """Checks that slots ``given`` have the names, shapes and dtypes of ``own``.

        Ignores empty arrays, and all but ``iterations`` on a shard without trainable elements.

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
