"""One small model, its gradients, and the two ways of training it: plain Keras and our shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from pserver.updates.allowlist import placement_for
from pserver.updates.engine import EngineKind, NDArray, Slots, UpdateEngine
from pserver.updates.factory import make_engine
from psrpc.core.encoding import Encoding, round_to, wire_dtype
from psrpc.core.placement import make_plan
from psrpc.core.plan import ArenaPlan, Plan, VariableSpec, aligned_empty


def _document(module: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


NON_NEGATIVE = _document("keras.constraints", "NonNeg", {})
UNIT_NORM = _document("keras.constraints", "UnitNorm", {"axis": 0})

MODEL = (
    VariableSpec("net/embedding/embeddings", (11, 5), "float32", "trainable"),
    VariableSpec("net/dense/kernel", (13, 7), "float32", "trainable"),
    VariableSpec("net/dense/bias", (7,), "float32", "trainable"),
    VariableSpec("net/scale", (), "float32", "trainable"),
    VariableSpec("net/tall/kernel", (7, 19), "float32", "trainable"),
    VariableSpec("net/norm/moving_mean", (7,), "float32", "state"),
)

CONSTRAINED = tuple(
    VariableSpec(v.name, v.shape, v.dtype, v.role, constraint)
    for v, constraint in zip(MODEL, (None, NON_NEGATIVE, None, None, UNIT_NORM, None), strict=True)
)

Values = dict[str, NDArray]
"""Variable name -> array of its shape."""


def serialized(name: str, **config: Any) -> dict[str, Any]:
    """An optimizer of Keras as a job description has it, arguments left out at their defaults."""
    config.setdefault("learning_rate", 0.01)
    return _document("keras.optimizers", name, config)


def schedule(name: str, **config: Any) -> dict[str, Any]:
    """A schedule of Keras as it stands in an optimizer's config."""
    return _document("keras.optimizers.schedules", name, config)


def initial(variables: Sequence[VariableSpec] = MODEL) -> Values:
    """The values training starts from, the same at every call."""
    rng = np.random.default_rng(7)
    return {v.name: rng.standard_normal(v.shape).astype(v.dtype) for v in variables}


def gradients(
    step: int, variables: Sequence[VariableSpec] = MODEL, encoding: Encoding = "plain"
) -> Values:
    """Gradients, or deltas for state, of one step; some are exactly 0.

    Those that may travel in ``encoding`` have been rounded to it, and widened again.
    """
    rng = np.random.default_rng(100 + step)
    values = {v.name: rng.standard_normal(v.shape).astype(v.dtype) for v in variables}
    for v in variables:
        values[v.name] *= rng.random(v.shape) > 0.1
        if encoding != "plain" and v.dtype == "float32" and v.role == "trainable":
            values[v.name] = round_to(values[v.name], encoding).astype(v.dtype)
    return values


def buffers(plan: Plan, shard: int, encoding: Encoding = "plain") -> dict[str, NDArray]:
    """Buffers for gradients: arena name -> aligned ``[shard length]``, uninitialised."""
    found = {}
    for a in plan.arenas:
        own = encoding if a.name == "float32.trainable" else "plain"
        dtype = wire_dtype(own, a.dtype)
        raw = aligned_empty(a.shard_length(shard) * dtype.itemsize, "uint8")
        found[a.name] = raw.view(dtype)
    return found


class Shards:
    """All shards of one plan with their engines, driven by whole variables.

    ``encoding`` is what gradients come in.
    """

    def __init__(
        self,
        kind: EngineKind,
        optimizer: Mapping[str, Any],
        shards: int,
        variables: Sequence[VariableSpec] = MODEL,
        values: Values | None = None,
        encoding: Encoding = "plain",
    ) -> None:
        self.plan = make_plan(variables, shards, placement_for(optimizer, variables))
        self.engines: list[UpdateEngine] = [
            make_engine(kind, optimizer, self.plan, k, encoding) for k in range(shards)
        ]
        self.variables = variables
        self.encoding = encoding
        self._buffers = [buffers(self.plan, k, encoding) for k in range(shards)]
        parts = self.cut(values or initial(variables))
        for engine, part in zip(self.engines, parts, strict=True):
            engine.load(part)

    def train(self, steps: range) -> None:
        """Applies the gradients of ``steps``."""
        for step in steps:
            parts = self.cut(gradients(step, self.variables, self.encoding))
            for engine, part, staging in zip(self.engines, parts, self._buffers, strict=True):
                for name, array in part.items():
                    np.copyto(staging[name], array, casting="same_kind")
                engine.apply(staging)
                for array in staging.values():
                    # The buffers are ours again; nothing may look at them.
                    array.fill(-1 if array.dtype.kind == "i" else np.nan)

    def values(self) -> Values:
        """Values of all shards."""
        return self.join([engine.snapshot() for engine in self.engines])

    def cut(self, values: Values) -> list[dict[str, NDArray]]:
        """Whole variables -> arena name -> flat values, per shard."""
        parts = []
        for shard in range(self.plan.shards):
            part = {}
            for arena in self.plan.arenas:
                flat = np.zeros(arena.shard_length(shard), arena.dtype)
                for s in self.plan.shard_slices(arena, shard):
                    if s.variable.name in values:
                        piece = values[s.variable.name].reshape(-1)[s.start : s.stop]
                        flat[s.offset : s.offset + len(piece)] = piece
                part[arena.name] = flat
            parts.append(part)
        return parts

    def join(self, parts: Sequence[Mapping[str, NDArray]]) -> Values:
        """The inverse of :meth:`cut`; arenas that a part lacks are passed over."""
        flat = {v.name: np.zeros(prod(v.shape), v.dtype) for v in self.variables}
        for shard, part in enumerate(parts):
            for arena in self._arenas(part):
                assert len(part[arena.name]) == arena.shard_length(shard)
                for s in self.plan.shard_slices(arena, shard):
                    values = part[arena.name][s.offset : s.offset + s.stop - s.start]
                    flat[s.variable.name][s.start : s.stop] = values
        return {v.name: flat[v.name].reshape(v.shape) for v in self.variables}

    def _arenas(self, part: Mapping[str, NDArray]) -> list[ArenaPlan]:
        return [arena for arena in self.plan.arenas if arena.name in part]

    def move_slots_to(self, other: Shards) -> None:
        """Carries the optimizer state into other cuts, as a checkpoint does."""
        given = [engine.slots() for engine in self.engines]
        names = {slot for g in given for slot in g.elements}
        whole = {s: self.join([g.elements.get(s, {}) for g in given]) for s in names}
        parts = {slot: other.cut(values) for slot, values in whole.items()}
        odd: dict[str, dict[str, NDArray]] = {}
        for g in given:
            for slot, per_variable in g.variables.items():
                odd.setdefault(slot, {}).update(per_variable)
        scalars = {name: value for g in given for name, value in g.scalars.items()}
        for shard, engine in enumerate(other.engines):
            here = owned(other.plan, shard)
            engine.load_slots(
                Slots(
                    elements={slot: p[shard] for slot, p in trainable(other.plan, parts).items()},
                    variables={
                        slot: {n: a for n, a in per_variable.items() if n in here}
                        for slot, per_variable in odd.items()
                    },
                    scalars=scalars,
                )
            )
            for per_shard in parts.values():
                for array in per_shard[shard].values():
                    array.fill(np.nan)  # They are ours; the engine must have copied them.


def owned(plan: Plan, shard: int) -> set[str]:
    """Names of the variables of which ``shard`` has a piece."""
    return {s.variable.name for arena in plan.arenas for s in plan.shard_slices(arena, shard)}


def trainable(
    plan: Plan, parts: dict[str, list[dict[str, NDArray]]]
) -> dict[str, list[dict[str, NDArray]]]:
    """``parts`` without the state arenas, which have no slots."""
    names = {a.name for a in plan.arenas if a.role == "trainable"}
    return {
        slot: [{n: a for n, a in part.items() if n in names} for part in per_shard]
        for slot, per_shard in parts.items()
    }


def plain_keras(
    optimizer: Mapping[str, Any],
    steps: int,
    variables: Sequence[VariableSpec] = MODEL,
    *,
    finalize: bool = False,
    encoding: Encoding = "plain",
) -> Values:
    """Variables after ``optimizer.apply`` on the whole of them, in one process and uncompiled;
    with ``finalize`` after what ``fit`` does to the variables at its end; from :func:`gradients`
    rounded to ``encoding``."""
    key = json.dumps([optimizer, steps, [vars(v) for v in variables], finalize, encoding])
    if key not in _PLAIN:
        _PLAIN[key] = _train_plainly(optimizer, steps, variables, finalize, encoding)
    return _PLAIN[key]


_PLAIN: dict[str, Values] = {}
"""Results so far: several tests hold theirs against the same one."""


def _train_plainly(
    optimizer_document: Mapping[str, Any],
    steps: int,
    variables: Sequence[VariableSpec],
    finalize: bool,
    encoding: Encoding,
) -> Values:
    import keras

    document = json.loads(json.dumps(optimizer_document))
    excluded = document.pop("excluded_from_weight_decay", [])
    # Not keras.optimizers.deserialize: Keras 3.15 answers Lamb with a string.
    optimizer = getattr(keras.optimizers, document["class_name"]).from_config(document["config"])
    start = initial(variables)
    trained = [v for v in variables if v.role == "trainable"]
    live = {}
    for v in trained:
        scope, _, name = v.name.rpartition("/")
        with keras.name_scope(scope.replace("/", "-") or "top"):
            live[v.name] = keras.Variable(start[v.name], name=name)
        if v.constraint is not None:
            live[v.name].constraint = keras.constraints.deserialize(v.constraint)
    if excluded:
        optimizer.exclude_from_weight_decay(var_list=[live[name] for name in excluded])
    total = {v.name: start[v.name].copy() for v in variables if v.role == "state"}
    for step in range(steps):
        given = gradients(step, variables, encoding)
        optimizer.apply([given[v.name] for v in trained], list(live.values()))
        for name, value in total.items():
            value += given[name]
    if finalize:
        optimizer.finalize_variable_values(list(live.values()))
    return {name: v.numpy() for name, v in live.items()} | total


def odd_shards(kind: EngineKind, optimizer: str) -> list[UpdateEngine]:
    """Three after an update: of a trainable variable, of a state variable, and of nothing."""
    variables = (
        VariableSpec("w", (3,), "float32", "trainable"),
        VariableSpec("mean", (2,), "float32", "state"),
    )
    plan = make_plan(variables, 3, "whole")
    engines = [make_engine(kind, serialized(optimizer), plan, k) for k in range(3)]
    for shard, owned in enumerate(((3, 0), (0, 2), (0, 0))):
        engine, staging = engines[shard], buffers(plan, shard)
        engine.load({n: np.ones_like(a) for n, a in staging.items()})
        for array in staging.values():
            array.fill(1)
        engine.apply(staging)
        assert tuple(len(a) for a in engine.snapshot().values()) == owned
        assert engine.slots().iterations == 1
    return engines
