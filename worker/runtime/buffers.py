"""The flat arrays that parameters are received into, as TensorFlow and as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from psrpc.core.plan import Plan, aligned_empty
from worker.data.source import Array


class ParameterBuffers:
    """One set of parameters: every arena of the plan whole, in plan order.

    ``arrays[name]`` is ``[length]``; ``tensors``, in the order of the plan, are the same memory as
    TensorFlow sees it, on the CPU, bfloat16 as uint16. Writing the array changes the tensor, so
    nobody may write while a step that was given the tensors runs, or while a result of that step
    is in use: an output of a step may be the very buffer of an input (the gradient of
    ``sum(w * w) / 2`` is ``w``). Whoever pulls while gradients are on their way takes turns with
    two sets.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """``arrays``: aligned and writable, arenas in the order of the plan, in their own dtype or
        rounded. They stay the caller's."""
        self.arrays = arrays
        # Once for good: TensorFlow does not take over a buffer that it does not own alone.
        self.tensors: Sequence[tf.Tensor] = tuple(map(tensor_of, arrays.values()))

    @classmethod
    def of(cls, plan: Plan) -> ParameterBuffers:
        """Zeros in memory of their own, not rounded."""
        arrays = {arena.name: aligned_empty(arena.length, arena.dtype) for arena in plan.arenas}
        for array in arrays.values():
            array.fill(0)
        return cls(arrays)


def tensor_of(array: Array) -> tf.Tensor:
    """``array``, which is aligned, as TensorFlow sees it; the same memory."""
    if array.dtype.name == "bfloat16":
        # DLPack of NumPy does not know it.
        array = array.view(np.uint16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
