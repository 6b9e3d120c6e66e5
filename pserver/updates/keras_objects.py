"""Builds Keras objects of allowed classes from serialized documents, finds an optimizer's state,
and calls compiled functions fast.

Keras's own deserializers make objects of any registered or importable class. This code base never
calls them; a test over the syntax trees checks that.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pserver.updates.allowlist import (
    check_constraint,
    check_initializer,
    check_optimizer,
    check_schedule,
)
from pserver.updates.engine import NDArray, frozen
from psrpc.core.encoding import LARGEST, Encoding, wire_dtype
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import ALIGNMENT_BYTES, ArenaPlan, Plan, aligned_empty

_BFLOAT16 = wire_dtype("bfloat16", "float32")

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def use_one_thread() -> None:
    """Makes TensorFlow compute each operation with one thread; call it before any computation."""
    tf.config.threading.set_intra_op_parallelism_threads(1)


class FlatFunction:
    """A compiled function of tensors that is fast to call.

    ``ConcreteFunction.__call__`` fits arguments to a signature and looks for tapes and graphs that
    might record the call. That takes 25 to 40 µs, as long as the update of a small model. This
    class skips both; the caller has to pass tensors of the right dtypes and shapes.
    """

    def __init__(self, function: Callable[..., Any], *tensors: Any, jit: bool) -> None:
        """Traces ``function`` for tensors like these; with ``jit``, XLA compiles it at its first
        call."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        # Without AutoGraph, since converting this code would take longer than tracing it.
        compiled = tf.function(function, jit_compile=jit, autograph=False)
        with tf.device(DEVICE):
            # The operation in __call__ honors jit_compile only in a nested function.
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
        """Returns a view of the present value. While it lives, updates write to other memory."""
        # Every pull comes here, so this does the same as ``read_value`` in a third of the time.
        return to_array(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype))


def view(variable: Any) -> NDArray:
    """Returns the present value of a variable that is rarely read."""
    return VariableView(variable)()


def to_array(tensor: Any) -> NDArray:
    """Returns a read-only view of ``tensor``."""
    return frozen(np.asarray(memoryview(tensor)))


def to_tensor(array: NDArray) -> Any:
    """Returns a tensor that is a view of ``array``, which must be contiguous, writable and on a
    64-byte boundary, or TensorFlow aborts the process. bfloat16 becomes uint16 of the same bits,
    because numpy cannot pass bfloat16 to DLPack."""
    if array.dtype == _BFLOAT16:
        array = array.view(np.uint16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def widened(tensor: Any, dtype: str) -> Any:
    """Casts a result of :func:`to_tensor` to ``dtype``, in a traced function."""
    if tensor.dtype == tf.uint16:
        tensor = tf.bitcast(tensor, tf.bfloat16)
    return tf.cast(tensor, dtype)


def rounded(tensor: Any, encoding: Encoding) -> Any:
    """Rounds float32 like :func:`psrpc.core.encoding.round_to`, in a traced function; bfloat16
    becomes uint16 of the same bits, ``plain`` stays."""
    if encoding == "plain":
        return tensor
    limit = LARGEST[encoding]
    inside = tf.where(tf.math.is_inf(tensor), tensor, tf.clip_by_value(tensor, -limit, limit))
    if encoding == "float16":
        return tf.cast(inside, tf.float16)
    return tf.bitcast(tf.cast(inside, tf.bfloat16), tf.uint16)


def taken(array: NDArray) -> Any:
    """Returns a tensor that uses the memory of ``array``, or of a copy if TensorFlow cannot use it.
    Callers must not write to ``array`` any more. TensorFlow's own conversion would make a second
    copy and keep the memory."""
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


def assign(variables: Iterable[Any], arrays: Iterable[NDArray]) -> None:
    """Makes ``arrays`` the values of Keras variables of their shapes and dtypes.
    Callers must not write to them any more; updates do not, since TensorFlow writes only to its own
    memory. Ten times as fast as ``Variable.assign`` for many small variables."""
    for variable, array in zip(variables, arrays, strict=True):
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=taken(array))


def zeros(length: int, dtype: npt.DTypeLike) -> NDArray:
    """Makes ``[length]`` zeros for :func:`to_tensor`; they take no memory until written."""
    dtype = np.dtype(dtype)
    pages = mmap.mmap(-1, length * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8).view(dtype)


Kind = Literal["optimizer", "schedule", "constraint", "initializer"]

_KINDS: Mapping[Kind, tuple[Any, Callable[[Mapping[str, Any]], None]]] = {
    "optimizer": (keras.optimizers, check_optimizer),
    "schedule": (keras.optimizers.schedules, check_schedule),
    "constraint": (keras.constraints, check_constraint),
    "initializer": (keras.initializers, check_initializer),
}


def rebuild(kind: Kind, document: Mapping[str, Any]) -> Any:
    """Builds the object of ``document``, a result of Keras's ``serialize`` for that kind.

    Raises:
        InvalidJob: its class is not on the allow-list, its arguments are not plain, or Keras
            refuses them.
    """
    classes, check = _KINDS[kind]
    check(document)
    name, config = document["class_name"], dict(document["config"])
    if kind == "optimizer" and isinstance(config.get("learning_rate"), Mapping):
        config["learning_rate"] = rebuild("schedule", config["learning_rate"])
    try:
        return getattr(classes, name)(**config)
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"Keras refuses the arguments of {kind} {name}: {error}") from error


@dataclass(frozen=True)
class VariablePiece:
    """Elements ``[offset, offset + size)`` of a shard's arena that form one Keras variable."""

    arena: str
    offset: int
    name: str
    shape: tuple[int, ...]
    constraint: Mapping[str, Any] | None

    @property
    def place(self) -> slice:
        """The slice of the piece's elements in the shard's part of the arena."""
        return slice(self.offset, self.offset + prod(self.shape))


def pieces_of(plan: Plan, arena: ArenaPlan, shard: int) -> list[VariablePiece]:
    """Returns the pieces of a shard's part of an arena."""
    if plan.placement == "cut":
        return [VariablePiece(arena.name, 0, arena.name, (arena.shard_length(shard),), None)]
    return [
        VariablePiece(
            arena.name, s.offset, s.variable.name, s.variable.shape, s.variable.constraint
        )
        for s in plan.shard_slices(arena, shard)
    ]


def make_variable(piece: VariablePiece, value: Any) -> Any:
    """Makes the Keras variable of ``piece`` with the tensor ``value``."""
    # The path is set afterwards, since the constructor takes none. Optimizers read it (Muon's
    # exclude_layers) and derive names from it, in which TensorFlow allows only certain characters.
    variable = keras.Variable(value, dtype=value.dtype.name, name="slice")
    variable._path = re.sub(r"[^\w./-]", "_", piece.name, flags=re.ASCII)
    if piece.constraint is not None:
        variable.constraint = rebuild("constraint", piece.constraint)
    return variable


_OWN_SHAPE = {("Adafactor", "r"), ("Adafactor", "c")}
"""Slots whose shape is not that of the variable: row and column statistics of each matrix."""

_NOT_SLOTS = {"_variables", "_trainable_variables"}

_FROM_CONFIG = {"learning_rate"}
"""Scalars that the job sets again on resume, so that an override takes effect."""


class SlotVariables:
    """The state of a built optimizer, by attribute name without leading underscore.

    Keras's variable names do not distinguish Adafactor's rows from its columns; attribute names do,
    and they are the same for every placement. Checkpoints contain them: load-bearing.

    Attributes:
        elements: slot name -> one variable per model variable, of its shape, or None.
        variables: slot name -> one variable per model variable, of its own shape, or None.
        scalars: name -> variable.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Raises InvalidJob if the optimizer keeps state in another way than those of Keras."""
        self.elements: dict[str, list[Any]] = {}
        self.variables: dict[str, list[Any]] = {}
        self.scalars: dict[str, Any] = {}
        accounted = set()
        keras_variable = type(optimizer._iterations)
        for attribute, value in vars(optimizer).items():
            name = attribute.lstrip("_")
            if isinstance(value, keras_variable):
                accounted.add(id(value))
                if name not in _FROM_CONFIG and (variables or attribute == "_iterations"):
                    self.scalars[name] = value
            elif (
                isinstance(value, list)
                and attribute not in _NOT_SLOTS
                and any(isinstance(v, keras_variable) for v in value)
            ):
                if len(value) != len(variables):
                    raise _unknown_state(optimizer, f"{len(value)} variables in {attribute}")
                accounted |= {id(v) for v in value}
                if (type(optimizer).__name__, name) in _OWN_SHAPE:
                    # For variables that are not matrices, Keras puts an unused integer here.
                    self.variables[name] = [
                        s if len(v.shape) >= 2 else None
                        for s, v in zip(value, variables, strict=True)
                    ]
                else:
                    self.elements[name] = list(value)
        if left := [v.path for v in optimizer.variables if id(v) not in accounted]:
            raise _unknown_state(optimizer, f"{', '.join(left)} in no attribute")


def _unknown_state(optimizer: Any, what: str) -> InvalidJob:
    made = f"{type(optimizer).__name__} of Keras {keras.__version__}"
    return InvalidJob(f"{made} has {what}, which shards cannot keep; choose another optimizer")


def keras_slot_names(optimizer: Mapping[str, Any], plan: Plan) -> list[str]:
    """Returns the names that checkpoints give to the slots and scalars of ``optimizer``, for the
    variables of ``plan``, a plan of one shard. Allocates no memory for the state itself.

    Raises:
        InvalidJob: shards refuse the optimizer.
    """
    with tf.device(DEVICE):
        variables = [
            make_variable(piece, tf.zeros([1] * len(piece.shape), arena.dtype))
            for arena in plan.arenas
            if arena.role == "trainable"
            for piece in pieces_of(plan, arena, 0)
        ]
        made = rebuild("optimizer", optimizer)
        made.build(variables)
        own = SlotVariables(made, variables)
    return sorted([*own.elements, *own.variables, *own.scalars])
