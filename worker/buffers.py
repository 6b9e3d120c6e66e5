"""The flat arrays that parameters are received into, as TensorFlow and as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from psrpc.plan import Plan, aligned_empty


class ParameterBuffers:
    """One set of parameters: every arena of the plan whole, in plan order.

    ``arrays[name]`` is ``[length]``, aligned and writable; ``tensors``, in the order of the plan,
    are the same memory as TensorFlow sees it, on the CPU. Writing the array changes the tensor,
    so nobody may write while a step that was given the tensors runs, or while a result of that
    step is in use: an output of a step may be the very buffer of an input (the gradient of
    ``sum(w * w) / 2`` is ``w``). Whoever pulls while gradients are on their way takes turns with
    two sets.
    """

    def __init__(self, plan: Plan) -> None:
        self.arrays = {a.name: aligned_empty(a.length, a.dtype) for a in plan.arenas}
        for array in self.arrays.values():
            array.fill(0)
        # Once for good: TensorFlow does not take over a buffer that it does not own alone.
        self.tensors: Sequence[tf.Tensor] = tuple(
            tf.experimental.dlpack.from_dlpack(array.__dlpack__()) for array in self.arrays.values()
        )
