"""The update engine without TensorFlow: a few optimizers that update numpy arrays in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pserver.updates.allowlist import EXCLUDED, check_optimizer
from pserver.updates.engine import ITERATIONS, NDArray, ShardArenas, Slots, frozen, scalar
from pserver.updates.lending import Lending, Spares
from pserver.updates.rules import make_rule
from pserver.updates.schedules import make_schedule
from psrpc.core.encoding import Encoding, round_to
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan, aligned_empty

_BLOCK = 32 * 1024
"""Number of elements updated at a time. Parameters, gradients, slots and scratch of a block stay in
the second-level cache, so an arena is read from memory once per step instead of once per
operation."""


class NumpyEngine:
    """An :class:`pserver.updates.engine.UpdateEngine` for SGD, Adagrad, Adam and AdamW.

    Each element is updated by the same sequence of correctly rounded operations, so the result is
    the same bit by bit for any number of shards and any block size.

    Raises:
        InvalidJob: the engine does not support the optimizer, an argument or a constraint.
    """

    def __init__(self, optimizer: Mapping[str, Any], plan: Plan, shard: int) -> None:
        check_optimizer(optimizer)
        self._name = optimizer["class_name"]
        self._rule = make_rule(optimizer)
        self._rate = make_schedule(optimizer["config"]["learning_rate"])
        self._decay = optimizer["config"].get("weight_decay")
        self._clip = optimizer["config"].get("clipvalue")
        if self._decay and optimizer.get(EXCLUDED):
            raise InvalidJob(
                "the numpy engine decays all variables alike, but "
                f"{', '.join(optimizer[EXCLUDED])} are excluded. Use engine keras"
            )
        for variable in plan.variables:
            if variable.role == "trainable" and variable.constraint is not None:
                raise InvalidJob(
                    f"the numpy engine has no constraints, but {variable.name!r} has "
                    f"{variable.constraint['class_name']}. Use engine keras"
                )
        self._arenas = ShardArenas(plan, shard)
        self._values: dict[str, NDArray] = {}
        self._slots: dict[str, dict[str, NDArray]] = {}
        self._iterations = 0
        spares = Spares()
        self._lending = Lending(spares)
        self._scratch = {
            dtype: [aligned_empty(_BLOCK, dtype) for _ in range(3)]
            for dtype in {self._arenas.dtypes[n] for n in self._arenas.trainable}
        }
        # Starts before there are values, because a job may take its first checkpoint as soon as
        # there are.
        arrays = self._arenas.owned + self._arenas.trainable * len(self._rule.slots)
        spares.prepare((self._arenas.lengths[n], self._arenas.dtypes[n]) for n in arrays)

    def load(self, values: Mapping[str, NDArray]) -> None:
        arenas = self._arenas
        arenas.check(values)
        # Frees the old arrays first: while a shard restores a checkpoint, the new ones are in
        # memory already.
        self._slots = {}
        self._lending.clear()
        self._values = {n: np.require(values[n], requirements=("C", "W")) for n in arenas.owned}
        self._slots = {
            slot: {n: aligned_empty(arenas.lengths[n], arenas.dtypes[n]) for n in arenas.trainable}
            for slot in (self._rule.slots if arenas.trainable else ())
        }
        for slot, arrays in self._slots.items():
            for array in arrays.values():
                array.fill(self._rule.slots[slot])
        self._iterations = 0

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        if not gradients:
            return
        self._arenas.check_gradients(gradients)
        # Rounds only the product, so that a scale that is the quotient of two rates yields exactly
        # the second rate.
        rate = np.float32(float(self._rate(self._iterations)) * rate_scale)
        # No warnings: a diverging run overflows here, and its loss already shows that. XLA does not
        # warn either.
        with np.errstate(all="ignore"):
            for name in self._arenas.trainable:
                self._update(name, gradients[name], rate)
            for name in self._arenas.state:
                own = self._lending.own(self._values[name])
                if name in self._arenas.replaced:
                    np.copyto(own, gradients[name])
                else:
                    np.add(self._values[name], gradients[name], out=own)
                self._values[name] = own
        self._iterations += 1

    def _update(self, name: str, gradients: NDArray, rate: np.float32) -> None:
        dtype = self._arenas.dtypes[name]
        old = [self._values[name], *(arrays[name] for arrays in self._slots.values())]
        new = [self._lending.own(array) for array in old]
        values, *slots = new
        factors = self._rule.factors(rate, self._iterations, dtype)
        real = np.dtype(dtype).type
        for start in range(0, len(values), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(values)))
            for before, after in zip(old, new, strict=True):
                if after is not before:
                    np.copyto(after[block], before[block])
            first, second, third = (s[: block.stop - start] for s in self._scratch[dtype])
            parameters, gradient = values[block], gradients[block]
            if gradient.dtype != parameters.dtype:
                np.copyto(third, gradient)
                gradient = third
            if self._clip:
                gradient = np.clip(gradient, real(-self._clip), real(self._clip), out=third)
            if self._decay:
                np.multiply(parameters, real(self._decay), out=first)
                first *= real(rate)
                parameters -= first
            self._rule.update(
                parameters, gradient, [s[block] for s in slots], factors, (first, second)
            )
        self._values[name] = values
        for arrays, array in zip(self._slots.values(), slots, strict=True):
            arrays[name] = array

    def snapshot(self, encoding: Encoding = "plain") -> dict[str, NDArray]:
        return self._arenas.ordered(
            {n: self._frozen(n, a, encoding) for n, a in self._values.items()}, encoding
        )

    def _frozen(self, name: str, values: NDArray, encoding: Encoding) -> NDArray:
        plain = self._arenas.wire_dtype(name, encoding) == values.dtype
        return self._lending.lend(values) if plain else frozen(round_to(values, encoding))

    def slots(self) -> Slots:
        return Slots(
            elements={
                slot: {n: self._lending.lend(a) for n, a in arrays.items()}
                for slot, arrays in self._slots.items()
            },
            scalars={ITERATIONS: scalar(self._iterations, "int64")},
        )

    def freeze(self) -> tuple[dict[str, NDArray], Slots]:
        return self.snapshot(), self.slots()

    def load_slots(self, slots: Slots) -> None:
        own = Slots(self._slots, scalars={ITERATIONS: scalar(self._iterations, "int64")})
        self._arenas.check_slots(slots, own, f"{self._name} on the numpy engine")
        for slot, arrays in self._slots.items():
            for name, array in arrays.items():
                arrays[name] = self._lending.own(array)
                np.copyto(arrays[name], slots.elements[slot][name])
        self._iterations = slots.iterations
