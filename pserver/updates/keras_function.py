"""Compiled functions of TensorFlow, and conversions between arrays and tensors without a copy."""

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
    """Makes TensorFlow compute each operation with one thread; call it before any computation."""
    tf.config.threading.set_intra_op_parallelism_threads(1)


class FlatFunction:
    """A concrete function of tensors with a fast call.

    ``ConcreteFunction.__call__`` fits arguments to a signature and looks for tapes and graphs
    that might record the call: 25 to 40 µs of Python, as much as the update of a small model.
    This class skips both; the caller ensures the dtypes and shapes.
    """

    def __init__(self, function: Callable[..., Any], *tensors: Any, jit: bool) -> None:
        """Traces ``function`` for tensors like these; with ``jit``, XLA compiles it at its first
        call."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        # Without AutoGraph: converting our own code takes longer than tracing it.
        compiled = tf.function(function, jit_compile=jit, autograph=False)
        with tf.device(DEVICE):
            # The operation in __call__ honors jit_compile only of a nested function.
            outer = tf.function(lambda *inputs: compiled(*inputs), autograph=False)
            self._concrete = outer.get_concrete_function(*specs)
        self._captured = tuple(self._concrete.captured_inputs)
        self._dtypes = [output.dtype for output in self._concrete.outputs]

    def __call__(self, *tensors: Any) -> list[Any]:
        """Calls the function and returns its flat outputs."""
        outputs: list[Any] | None = tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *self._captured], Tout=self._dtypes, f=self._concrete, config_proto=""
        )
        return outputs or []


class VariableView:
    """Reads one Keras variable without a copy."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._handle, self._dtype = variable.value.handle, variable.value.dtype

    def __call__(self) -> NDArray:
        """Returns the present value; while the array lives, a later update writes elsewhere."""
        # Does what ``read_value`` does in a third of its time, since every pull comes here.
        return to_array(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype))


def view(variable: Any) -> NDArray:
    """Returns the present value of a variable that is rarely read."""
    return VariableView(variable)()


def to_array(tensor: Any) -> NDArray:
    """Returns a read-only view of ``tensor``."""
    return frozen(np.asarray(memoryview(tensor)))


def to_tensor(array: NDArray) -> Any:
    """Returns a view of ``array``, which is contiguous, writable and on a 64-byte boundary, or
    TensorFlow aborts the process. bfloat16, which numpy does not give to DLPack, becomes uint16 of
    the same bits."""
    if array.dtype == _BFLOAT16:
        array = array.view(np.uint16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def widened(tensor: Any, dtype: str) -> Any:
    """Casts a result of :func:`to_tensor` to ``dtype``, in a traced function."""
    if tensor.dtype == tf.uint16:
        tensor = tf.bitcast(tensor, tf.bfloat16)
    return tf.cast(tensor, dtype)


def rounded(tensor: Any, encoding: Encoding) -> Any:
    """Rounds float32 as :func:`psrpc.core.encoding.round_to`, in a traced function; bfloat16
    becomes uint16 of the same bits, ``plain`` stays."""
    if encoding == "plain":
        return tensor
    limit = LARGEST[encoding]
    inside = tf.where(tf.math.is_inf(tensor), tensor, tf.clip_by_value(tensor, -limit, limit))
    if encoding == "float16":
        return tf.cast(inside, tf.float16)
    return tf.bitcast(tf.cast(inside, tf.bfloat16), tf.uint16)


def taken(array: NDArray) -> Any:
    """Returns a tensor on the memory of ``array``, which callers must not write any more, or of a
    copy if TensorFlow cannot use it. TensorFlow's own conversion would make a second copy and keep
    the memory."""
    if array.ctypes.data % ALIGNMENT_BYTES or not (
        array.flags.c_contiguous and array.flags.writeable
    ):
        fit = aligned_empty(array.size, str(array.dtype)).reshape(array.shape)
        np.copyto(fit, array)
        array = fit
    return to_tensor(array)


def copied(array: NDArray) -> Any:
    """Copies any ``array`` to a new tensor."""
    with tf.device(DEVICE):
        return tf.raw_ops.DeepCopy(x=taken(array))


def zeros(length: int, dtype: npt.DTypeLike) -> NDArray:
    """Makes ``[length]`` zeros for :func:`to_tensor`; they take no memory until written."""
    dtype = np.dtype(dtype)
    pages = mmap.mmap(-1, length * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8).view(dtype)
