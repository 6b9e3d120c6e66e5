"""A compiled function of TensorFlow, and how arrays go into it and come out without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pserver.updates.engine import NDArray, frozen
from psrpc.core.encoding import LARGEST, Encoding, wire_dtype
from psrpc.core.plan import ALIGNMENT_BYTES, aligned_empty

_BFLOAT16 = wire_dtype("bfloat16", "float32")

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def use_one_thread() -> None:
    """Has TensorFlow compute each operation with one thread; before it computes anything."""
    tf.config.threading.set_intra_op_parallelism_threads(1)


class FlatFunction:
    """A concrete function of tensors, called with little around it.

    ``ConcreteFunction.__call__`` fits arguments to a signature and looks for tapes and graphs
    that might record the call: 25 to 40 µs of Python, as much as the update of a small model
    takes. This does what is left when there are none; the caller sees to dtypes and shapes.
    """

    def __init__(self, function: Callable[..., Any], *tensors: Any, jit: bool) -> None:
        """Traces ``function`` for tensors like these; with ``jit``, XLA compiles it at its first
        call."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        compiled = tf.function(function, jit_compile=jit)
        with tf.device(DEVICE):
            # Around it another function: the operation below, by itself, would not ask XLA.
            around = tf.function(lambda *inputs: compiled(*inputs))
            self._concrete = around.get_concrete_function(*specs)
        self._captured = tuple(self._concrete.captured_inputs)
        self._dtypes = [output.dtype for output in self._concrete.outputs]

    def __call__(self, *tensors: Any) -> list[Any]:
        """What the function returns, flat."""
        found: list[Any] | None = tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *self._captured], Tout=self._dtypes, f=self._concrete, config_proto=""
        )
        return found or []


class VariableView:
    """Reads one Keras variable, without a copy."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._handle, self._dtype = variable.value.handle, variable.value.dtype

    def __call__(self) -> NDArray:
        """The value as it is now; a later update writes elsewhere while this array lives."""
        # What ``read_value`` does, for a third of its time: this is on the path of every pull.
        return to_array(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype))


def view(variable: Any) -> NDArray:
    """The present value of one that is read now and then."""
    return VariableView(variable)()


def to_array(tensor: Any) -> NDArray:
    """A read-only view of ``tensor``."""
    return frozen(np.asarray(memoryview(tensor)))


def to_tensor(array: NDArray) -> Any:
    """A view of ``array``: contiguous, writable, on a 64-byte boundary, or TensorFlow aborts the
    process. bfloat16, which numpy does not give to DLPack, becomes uint16 of the same bits."""
    if array.dtype == _BFLOAT16:
        array = array.view(np.uint16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def widened(tensor: Any, dtype: str) -> Any:
    """In a traced function: what :func:`to_tensor` gave it, as ``dtype``."""
    if tensor.dtype == tf.uint16:
        tensor = tf.bitcast(tensor, tf.bfloat16)
    return tf.cast(tensor, dtype)


def rounded(tensor: Any, encoding: Encoding) -> Any:
    """In a traced function: float32 as :func:`psrpc.core.encoding.round_to` would round it,
    bfloat16 as uint16 of the same bits; ``plain`` as it is."""
    if encoding == "plain":
        return tensor
    limit = LARGEST[encoding]
    inside = tf.where(tf.math.is_inf(tensor), tensor, tf.clip_by_value(tensor, -limit, limit))
    if encoding == "float16":
        return tf.cast(inside, tf.float16)
    return tf.bitcast(tf.cast(inside, tf.bfloat16), tf.uint16)


def taken(array: NDArray) -> Any:
    """A tensor whose memory is ``array``'s, which nobody may write to any more; or a copy's, if
    TensorFlow cannot have it as it is. TensorFlow's conversion makes a second copy on the way and
    keeps the memory."""
    if array.ctypes.data % ALIGNMENT_BYTES or not (
        array.flags.c_contiguous and array.flags.writeable
    ):
        fit = aligned_empty(array.size, str(array.dtype)).reshape(array.shape)
        np.copyto(fit, array)
        array = fit
    return to_tensor(array)


def copied(array: NDArray) -> Any:
    """A tensor of its own with what is in ``array``, which may be any."""
    with tf.device(DEVICE):
        return tf.raw_ops.DeepCopy(x=taken(array))


def zeros(length: int, dtype: npt.DTypeLike) -> NDArray:
    """``[length]`` zeros for :func:`to_tensor`, which take no memory while they are only read."""
    dtype = np.dtype(dtype)
    pages = mmap.mmap(-1, length * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8).view(dtype)
