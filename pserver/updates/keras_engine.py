"""The update engine that runs any built-in Keras optimizer, compiled by XLA, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import structlog
import tensorflow as tf

from pserver.updates.allowlist import EXCLUDED, check_optimizer, needs_single_shard, placement_for
from pserver.updates.engine import NDArray, ShardArenas, Slots
from pserver.updates.keras_objects import (
    DEVICE,
    FlatFunction,
    SlotVariables,
    VariableView,
    make_variable,
    pieces_of,
    rebuild,
    rounded,
    taken,
    to_array,
    to_tensor,
    view,
    widened,
    zeros,
)
from pserver.updates.keras_state import KerasState
from pserver.updates.lending import Spares
from psrpc.core.encoding import Encoding, wire_dtype
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan

# XLA raises these if it cannot compile a function; if memory runs out it raises another error.
_NOT_COMPILED = (
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)

_log = structlog.get_logger()


class KerasEngine:
    """An :class:`pserver.updates.engine.UpdateEngine` around a Keras optimizer.

    With cut placement every trainable arena is one flat Keras variable. With whole placement every
    model variable is one Keras variable, with its shape, path and constraint. State arenas are flat
    variables. One compiled function takes the flat gradients (by DLPack, without a copy) and
    updates all variables; each combination of gradient dtypes has its own function.

    ``hosted`` says that the process is a worker's: calls then name the CPU, where TensorFlow might
    prefer another device of the worker. A shard has no other, and saves the 20 µs.

    Raises:
        InvalidJob: the optimizer is not on the allow-list, Keras refuses its arguments, or its
            update cannot run on this plan.
    """

    def __init__(
        self,
        optimizer: Mapping[str, Any],
        plan: Plan,
        shard: int,
        wire: Encoding = "plain",
        *,
        hosted: bool = False,
    ) -> None:
        check_optimizer(optimizer)
        if keras.backend.backend() != "tensorflow":
            raise InvalidJob(
                f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow"
            )
        if (chosen := keras.config.floatx()) != "float32":
            # Set by the job file in a worker that hosts the shard.
            what = "updates would have other bits; leave set_floatx out, or say engine='numpy'"
            raise InvalidJob(f"keras.config.floatx() is {chosen}, in which {what}")
        reason = needs_single_shard(optimizer)
        if reason and plan.dense_shards > 1:
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
        rebuild("optimizer", optimizer)  # Refuses bad arguments now rather than at load.
        self._arenas = ShardArenas(plan, shard)
        self._pieces = [
            piece
            for arena in plan.arenas
            if arena.name in self._arenas.trainable
            for piece in pieces_of(plan, arena, shard)
        ]
        self._whole = plan.placement == "whole"
        self._wire = wire
        self._spares = Spares()
        self._on_cpu: Callable[[], AbstractContextManager[Any]]
        self._on_cpu = (lambda: tf.device(DEVICE)) if hosted else nullcontext
        self._steps: dict[tuple[bool, tuple[np.dtype[Any], ...]], FlatFunction] = {}
        """(whether the learning rate is scaled, gradient dtypes) -> compiled step."""

    def load(self, values: Mapping[str, NDArray]) -> None:
        self._arenas.check(values)
        with tf.device(DEVICE):
            parts = [
                taken(values[piece.arena][piece.place].reshape(piece.shape))
                for piece in self._pieces
            ]
            state = {n: taken(values[n]) for n in self._arenas.state}
            self._variables = list(map(make_variable, self._pieces, parts))
            self._state = {
                n: keras.Variable(tensor, dtype=self._arenas.dtypes[n], trainable=False)
                for n, tensor in state.items()
            }
            self._optimizer = rebuild("optimizer", self._serialized)
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
            slot_variables = SlotVariables(self._optimizer, self._variables)
            self._checkpointed = KerasState(
                self._arenas,
                self._pieces,
                self._variables,
                self._state,
                slot_variables,
                self._spares,
            )
            self._views = {n: VariableView(v) for n, v in self._state.items()}
            if not self._whole:
                for piece, variable in zip(self._pieces, self._variables, strict=True):
                    self._views[piece.arena] = VariableView(variable)
            self._joins: dict[Encoding, FlatFunction] = {}
            self._compile([*parts, *state.values()])

    def _compile(self, values: Sequence[Any]) -> None:
        """Compiles the functions that the job needs, so that the first push does not wait for it.

        XLA compiles a function at its first run, so this method runs the steps once on zeros and
        then undoes their effect. ``values`` are the tensors of the variables. Because this method
        holds them, the steps write to other memory and ``values`` stay as they are.
        """
        initial = [_initial(v) for v in self._optimizer.variables]
        encodings: dict[Encoding, None] = dict.fromkeys(("plain", self._wire))
        self._steps, self._jit = {}, True
        for encoding in encodings:
            self._try_step([self._arenas.wire_dtype(n, encoding) for n in self._arenas.owned])
        for variable, value in zip([*self._variables, *self._state.values()], values, strict=True):
            variable.assign(value)
        for variable, value in zip(self._optimizer.variables, initial, strict=True):
            variable.assign(tf.broadcast_to(value, variable.shape))
        self._flat: dict[str, NDArray] = {}
        for encoding in encodings:
            self.snapshot(encoding)

    def _try_step(self, dtypes: Sequence[np.dtype[Any]]) -> None:
        """Runs the step on zeros, without XLA if XLA fails to compile it."""
        lengths = [self._arenas.lengths[n] for n in self._arenas.owned]
        nothing = [zeros(n, dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        try:
            self._step(nothing)
        except _NOT_COMPILED as error:
            _log.warning(
                "XLA does not compile this optimizer; its updates will be slower",
                optimizer=self._serialized["class_name"],
                reason=str(error).splitlines()[0],
            )
            self._steps, self._jit = {}, False
            self._step(nothing)

    def _step(self, arrays: Sequence[NDArray], rate_scale: float = 1.0) -> None:
        """Takes one step with an array per owned arena."""
        scaled = rate_scale != 1.0
        kind = scaled, tuple([array.dtype for array in arrays])
        tensors = [to_tensor(array) for array in arrays]
        if scaled:
            tensors.append(tf.constant(rate_scale, tf.float32))
        step = self._steps.get(kind)
        if step is None:
            # A scaled step needs its own function: XLA reorders products, so even a scale of 1
            # could change bits.
            update = self._scaled_update if scaled else self._update
            step = self._steps[kind] = FlatFunction(update, *tensors, jit=self._jit)
        with self._on_cpu():
            step(*tensors)

    def _scaled_update(self, *arrays: Any) -> None:
        """Traces :meth:`_update` with the learning rate multiplied by the last of ``arrays``."""
        *flat, rate_scale = arrays
        current = self._optimizer._get_current_learning_rate
        # Keras calls this method wherever it needs the rate: for updates, weight decay and
        # schedules.
        own = vars(self._optimizer)
        own["_get_current_learning_rate"] = lambda: tf.cast(current(), tf.float32) * rate_scale
        try:
            self._update(*flat)
        finally:
            del own["_get_current_learning_rate"]

    def _update(self, *arrays: Any) -> None:
        """Traces one step. ``arrays`` are the gradients of the trainable arenas, then the changes
        of the state arenas."""
        flat = {
            name: widened(array, self._arenas.dtypes[name])
            for name, array in zip(self._arenas.owned, arrays, strict=True)
        }
        if self._pieces:
            self._optimizer.apply(
                [tf.reshape(flat[p.arena][p.place], p.shape) for p in self._pieces]
            )
        else:
            # Keras does not count a step without variables, but the other shards do count this
            # step.
            self._optimizer._iterations.assign_add(1)
        for name, variable in self._state.items():
            change = flat[name]
            if name in self._arenas.replaced:
                # Adds a difference instead of assigning, since after assign() the variable might
                # keep using the caller's memory. Integers wrap around, so the sum is exact.
                change -= variable.value
            variable.value.assign_add(change)

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        assert self._steps, "load comes first"
        if not gradients:
            return
        self._arenas.check_gradients(gradients)
        self._arenas.check_aligned(gradients)
        self._flat = {}
        self._step([gradients[n] for n in self._arenas.owned], rate_scale)

    def snapshot(self, encoding: Encoding = "plain") -> dict[str, NDArray]:
        assert self._steps, "load comes first"
        values = {} if encoding == "plain" else self._joined(encoding)
        for name in self._arenas.owned:
            if name in self._views and name not in values:
                values[name] = self._views[name]()
        if len(values) < len(self._arenas.owned):
            # `_flat` caches these until the next update.
            self._flat = self._flat or self._joined("plain")
            values = self._flat | values
        return self._arenas.ordered(values, encoding)

    def _joined(self, encoding: Encoding) -> dict[str, NDArray]:
        """Returns new arrays of those trainable arenas that may have this encoding."""
        dtype = wire_dtype(encoding, "float32")
        names = [
            n for n in self._arenas.trainable if encoding == "plain" or n in self._arenas.encodable
        ]
        if not names:
            return {}
        if encoding not in self._joins:
            self._joins[encoding] = FlatFunction(
                lambda: [rounded(self._concatenated(n), encoding) for n in names], jit=True
            )
        with self._on_cpu():
            arrays = [to_array(tensor) for tensor in self._joins[encoding]()]
        if encoding != "plain":
            arrays = [array.view(dtype) for array in arrays]
        return dict(zip(names, arrays, strict=True))

    def _concatenated(self, arena: str) -> Any:
        pieces = zip(self._pieces, self._variables, strict=True)
        return tf.concat([tf.reshape(v.value, [-1]) for p, v in pieces if p.arena == arena], 0)

    def slots(self) -> Slots:
        assert self._steps, "load comes first"
        return self._checkpointed.slots()

    def freeze(self) -> tuple[dict[str, NDArray], Slots]:
        assert self._steps, "load comes first"
        return self._checkpointed.freeze()

    def load_slots(self, slots: Slots) -> None:
        what = f"{self._serialized['class_name']} on the keras engine"
        self._arenas.check_slots(slots, self.slots(), what)
        self._checkpointed.load(slots)


def _initial(variable: Any) -> Any:
    """Copies the value of a variable. If all elements are equal, as in nearly all slots, returns
    just one number."""
    value = view(variable)
    return value.flat[0] if value.size and value.min() == value.max() else value.copy()
