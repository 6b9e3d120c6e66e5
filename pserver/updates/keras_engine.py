"""The update engine that runs any built-in Keras optimizer, compiled by XLA, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import keras
import numpy as np
import structlog
import tensorflow as tf

from pserver.updates.allowlist import EXCLUDED, check_optimizer, needs_single_shard, placement_for
from pserver.updates.arenas import ShardArenas
from pserver.updates.engine import NDArray, Slots, frozen
from pserver.updates.keras_slots import SlotVariables
from psrpc.errors import InvalidJob
from psrpc.plan import ArenaPlan, Plan

_DEVICE = "CPU:0"

# What XLA answers with when it cannot compile a function; running out of memory is not among it.
_NOT_COMPILED = (
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)

_log = structlog.get_logger()


@dataclass(frozen=True)
class Piece:
    """What becomes one Keras variable: elements ``[offset, offset + size)`` of a shard's arena."""

    arena: str
    offset: int
    name: str
    shape: tuple[int, ...]
    constraint: Mapping[str, Any] | None

    @property
    def place(self) -> slice:
        """Its elements in the shard's part of the arena."""
        return slice(self.offset, self.offset + prod(self.shape))


class KerasEngine:
    """An :class:`pserver.updates.engine.UpdateEngine` around a Keras optimizer.

    With cut placement every trainable arena is one flat Keras variable; with whole placement
    every model variable is one, with its shape, path and constraint. State arenas are flat
    variables. One compiled function per engine takes the flat gradients, by DLPack and without a
    copy, and updates everything.

    Raises:
        InvalidJob: the optimizer is not on the allow-list, Keras refuses its arguments, or its
            update cannot run on this plan.
    """

    def __init__(self, optimizer: Mapping[str, Any], plan: Plan, shard: int) -> None:
        check_optimizer(optimizer)
        if keras.backend.backend() != "tensorflow":
            raise InvalidJob(
                f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow"
            )
        reason = needs_single_shard(optimizer)
        if reason and plan.shards > 1:
            raise InvalidJob(reason)
        if placement_for(optimizer, plan.variables) == "whole" and plan.placement == "cut":
            raise InvalidJob(
                f"the update of {optimizer['class_name']} needs whole variables here, but the "
                "plan cuts them; make the plan with placement whole"
            )
        unknown = set(optimizer.get(EXCLUDED, ())) - {v.name for v in plan.variables}
        if unknown:
            raise InvalidJob(f"{EXCLUDED} names {', '.join(sorted(unknown))}: no such variable")
        self._serialized = optimizer
        _make_optimizer(optimizer)  # Refuses bad arguments now rather than at load.
        self._arenas = ShardArenas(plan, shard)
        self._pieces = [
            piece
            for arena in plan.arenas
            if arena.name in self._arenas.trainable
            for piece in _pieces_of(plan, arena, shard)
        ]
        self._whole = plan.placement == "whole"
        self._flat: dict[str, NDArray] = {}
        self._step: Any = None

    def load(self, values: Mapping[str, NDArray]) -> None:
        self._arenas.check(values)
        with tf.device(_DEVICE):
            self._variables = [
                _make_variable(piece, values[piece.arena][piece.place]) for piece in self._pieces
            ]
            self._state = {
                n: keras.Variable(values[n], dtype=self._arenas.dtypes[n], trainable=False)
                for n in self._arenas.state
            }
            self._optimizer = _make_optimizer(self._serialized)
            excluded = set(self._serialized.get(EXCLUDED, ()))
            if excluded:
                self._optimizer.exclude_from_weight_decay(
                    var_list=[
                        variable
                        for piece, variable in zip(self._pieces, self._variables, strict=True)
                        if piece.name in excluded
                    ]
                )
            self._optimizer.build(self._variables)
            self._slot_variables = SlotVariables(self._optimizer, self._variables)
            self._step = self._compile()
            self._concat = tf.function(self._concat_variables, jit_compile=True)
            self._flat = {}
            if self._whole:
                self._flatten()

    def _compile(self) -> Any:
        """The compiled step. Each candidate runs once on zeros, and what that did is undone: so
        compiling is over before the first push, and whether XLA can is known by trying."""
        specs = [
            tf.TensorSpec([self._arenas.lengths[n]], self._arenas.dtypes[n], n)
            for n in self._arenas.owned
        ]
        kept = (*self._variables, *self._optimizer.variables, *self._state.values())
        variables = [v.value for v in kept]
        # The values as they are: the step writes to new buffers while these are held.
        before = [v.read_value() for v in variables]
        for compiled in (True, False):
            step = tf.function(self._update, jit_compile=compiled).get_concrete_function(*specs)
            try:
                step(*(tf.zeros(spec.shape, spec.dtype) for spec in specs))
            except _NOT_COMPILED as error:
                if not compiled:
                    raise
                _log.warning(
                    "XLA does not compile this optimizer; its updates will be slower",
                    optimizer=self._serialized["class_name"],
                    reason=str(error).splitlines()[0],
                )
            else:
                break
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return step

    def _update(self, *arrays: Any) -> None:
        """One step, traced: gradients of the trainable arenas, then deltas of the state arenas."""
        flat = dict(zip(self._arenas.owned, arrays, strict=True))
        if self._pieces:
            self._optimizer.apply(
                [tf.reshape(flat[p.arena][p.place], p.shape) for p in self._pieces]
            )
        else:
            # Keras counts nothing when there is nothing to update; the other shards do.
            self._optimizer._iterations.assign_add(1)
        for name, variable in self._state.items():
            variable.value.assign_add(flat[name])

    def apply(self, gradients: Mapping[str, NDArray]) -> None:
        assert self._step is not None, "load comes first"
        if not gradients:
            return
        self._arenas.check(gradients)
        self._arenas.check_aligned(gradients)
        self._flat = {}
        with tf.device(_DEVICE):
            self._step(
                *(
                    tf.experimental.dlpack.from_dlpack(gradients[n].__dlpack__())
                    for n in self._arenas.owned
                )
            )

    def snapshot(self) -> dict[str, NDArray]:
        assert self._step is not None, "load comes first"
        with tf.device(_DEVICE):
            if self._whole:
                values = self._flatten()
            else:
                values = {
                    p.arena: _view(v) for p, v in zip(self._pieces, self._variables, strict=True)
                }
            return self._arenas.ordered(values | {n: _view(v) for n, v in self._state.items()})

    def _flatten(self) -> dict[str, NDArray]:
        """The trainable arenas of whole variables; joined once between two updates."""
        if not self._flat:
            joined = self._concat()
            self._flat = {n: _array(t) for n, t in zip(self._arenas.trainable, joined, strict=True)}
        return dict(self._flat)

    def _concat_variables(self) -> list[Any]:
        return [
            tf.concat(
                [
                    tf.reshape(v.value, [-1])
                    for p, v in zip(self._pieces, self._variables, strict=True)
                    if p.arena == name
                ],
                0,
            )
            for name in self._arenas.trainable
        ]

    def slots(self) -> Slots:
        assert self._step is not None, "load comes first"
        own = self._slot_variables
        with tf.device(_DEVICE):
            return Slots(
                elements={
                    slot: {n: self._joined(n, variables) for n in self._arenas.trainable}
                    for slot, variables in own.elements.items()
                },
                variables={
                    slot: {
                        p.name: _view(v)
                        for p, v in zip(self._pieces, variables, strict=True)
                        if v is not None
                    }
                    for slot, variables in own.variables.items()
                },
                scalars={name: _view(v) for name, v in own.scalars.items()},
            )

    def _joined(self, arena: str, variables: Sequence[Any]) -> NDArray:
        """A per-element slot as one ``[shard length]`` array."""
        parts = [
            np.zeros(prod(p.shape), self._arenas.dtypes[arena]) if v is None else _view(v).ravel()
            for p, v in zip(self._pieces, variables, strict=True)
            if p.arena == arena
        ]
        return frozen(np.concatenate(parts)) if self._whole else parts[0]

    def load_slots(self, slots: Slots) -> None:
        what = f"{self._serialized['class_name']} on the keras engine"
        self._arenas.check_slots(slots, self.slots(), what)
        own = self._slot_variables
        with tf.device(_DEVICE):
            for slot, variables in own.elements.items():
                for p, v in zip(self._pieces, variables, strict=True):
                    if v is not None:
                        v.assign(slots.elements[slot][p.arena][p.place].reshape(p.shape))
            for slot, variables in own.variables.items():
                for p, v in zip(self._pieces, variables, strict=True):
                    if v is not None:
                        v.assign(slots.variables[slot][p.name])
            for name, variable in own.scalars.items():
                variable.assign(slots.scalars[name])


def _pieces_of(plan: Plan, arena: ArenaPlan, shard: int) -> list[Piece]:
    if plan.placement == "cut":
        return [Piece(arena.name, 0, arena.name, (arena.shard_length(shard),), None)]
    return [
        Piece(arena.name, s.offset, s.variable.name, s.variable.shape, s.variable.constraint)
        for s in plan.shard_slices(arena, shard)
    ]


def _make_optimizer(serialized: Mapping[str, Any]) -> Any:
    """The optimizer, built by its class's own name: no general deserializer sees the document."""
    name, config = serialized["class_name"], dict(serialized["config"])
    rate = config.get("learning_rate")
    try:
        if isinstance(rate, Mapping):
            schedule = getattr(keras.optimizers.schedules, rate["class_name"])
            config["learning_rate"] = schedule(**rate["config"])
        return getattr(keras.optimizers, name)(**config)
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"Keras refuses the arguments of optimizer {name}: {error}") from error


def _make_variable(piece: Piece, values: NDArray) -> Any:
    # Optimizers read a variable's path (Muon's exclude_layers) and name their own after it, in
    # letters that TensorFlow allows; the constructor takes no path.
    variable = keras.Variable(values.reshape(piece.shape), dtype=str(values.dtype), name="slice")
    variable._path = re.sub(r"[^\w./-]", "_", piece.name, flags=re.ASCII)
    if piece.constraint is not None:
        constraint = getattr(keras.constraints, piece.constraint["class_name"])
        variable.constraint = constraint(**piece.constraint["config"])
    return variable


def _view(variable: Any) -> NDArray:
    """The value as it is now; a later update writes elsewhere while this array lives."""
    tensor = variable.value
    # What ``read_value`` does, for a fifth of its time: this is on the path of every pull.
    return _array(tf.raw_ops.ReadVariableOp(resource=tensor.handle, dtype=tensor.dtype))


def _array(tensor: Any) -> NDArray:
    return frozen(np.asarray(memoryview(tensor)))
