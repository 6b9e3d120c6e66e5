"""The arenas of one shard: their sizes, and the checks of incoming arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pserver.updates.engine import ITERATIONS, NDArray, Slots
from psrpc.core.encoding import Encoding, wire_dtype
from psrpc.core.errors import CheckpointError, InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES, Plan

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
