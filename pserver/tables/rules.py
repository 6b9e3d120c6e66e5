"""The optimizers of embedding tables, on blocks of gathered rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.updates.allowlist import check_arguments, check_optimizer
from pserver.updates.engine import NDArray
from pserver.updates.rules import UpdateRule, make_rule
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import TableSpec

PER_ROW = frozenset({"row_accumulators"})
"""Slots with one element per row. Persisted names, load-bearing."""

_KNOWN = {
    "SGD": {"momentum", "nesterov"},
    "Adagrad": {"initial_accumulator_value", "epsilon"},
    "RowwiseAdagrad": {"initial_accumulator_value", "epsilon"},
    "Adam": {"beta_1", "beta_2", "epsilon", "amsgrad"},
    "Ftrl": {
        "learning_rate_power",
        "initial_accumulator_value",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "l2_shrinkage_regularization_strength",
        "beta",
    },
}
_COMMON = {"name", "learning_rate", "clipvalue", "ema_momentum", "ema_overwrite_frequency"}


class RowwiseAdagrad:
    """Adagrad with one accumulator s per row, which sums the mean squared gradients of the row::

        s ← s + mean(g²);   w ← w − learning_rate · g / (√s + ε)

    Mudigere et al. 2021, "Software-hardware co-design for fast and scalable training of deep
    learning recommendation models" (arXiv:2104.05158), in the form of DLRM and FBGEMM, with
    FBGEMM's defaults: s begins at 0, ε is 1e-8. ``worker.RowwiseAdagrad`` has the same.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._epsilon = config.get("epsilon", 1e-8)
        self.slots: Mapping[str, float] = {
            "row_accumulators": config.get("initial_accumulator_value", 0.0)
        }

    def factors(self, learning_rate: np.float32, _iterations: int, dtype: str, /) -> Any:
        real = np.dtype(dtype).type
        return real(learning_rate), real(self._epsilon)

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        """See :class:`pserver.updates.rules.UpdateRule`; arrays are ``[n, width]``, the slot is
        ``[n, 1]``."""
        rate, epsilon = factors
        step, square = scratch
        (accumulator,) = slots
        np.multiply(gradients, gradients, out=square)
        accumulator += square.mean(axis=1, keepdims=True)
        root = np.sqrt(accumulator)
        root += epsilon
        np.multiply(gradients, rate, out=step)
        step /= root
        parameters -= step


class Ftrl:
    """FTRL-proximal, elementwise, as ``keras.optimizers.Ftrl`` computes it.

    McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1. With n the
    accumulator, z the linear term, p the (negative) learning-rate power::

        n' = n + g²;   z ← z + g + 2 l2_shrinkage w − (n'^−p − n^−p) / learning_rate · w
        w ← (clip(z, ±l1) − z) / (n'^−p / learning_rate + 2 l2 + beta / learning_rate)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._power = -config.get("learning_rate_power", -0.5)
        self._l1 = config.get("l1_regularization_strength", 0.0)
        self._l2 = config.get("l2_regularization_strength", 0.0)
        self._shrinkage = config.get("l2_shrinkage_regularization_strength", 0.0)
        self._beta = config.get("beta", 0.0)
        for name, value, good in (
            ("learning_rate_power", -self._power, self._power >= 0),
            ("l1_regularization_strength", self._l1, self._l1 >= 0),
            ("l2_regularization_strength", self._l2, self._l2 >= 0),
            ("l2_shrinkage_regularization_strength", self._shrinkage, self._shrinkage >= 0),
        ):
            if not good:
                sign = "negative" if name == "learning_rate_power" else "positive"
                raise InvalidJob(f"Ftrl({name}={value}); expected 0 or a {sign} number")
        first = config.get("initial_accumulator_value", 0.1)
        self.slots: Mapping[str, float] = {"accumulators": first, "linears": 0.0}

    def factors(self, learning_rate: np.float32, _iterations: int, dtype: str, /) -> Any:
        real = np.dtype(dtype).type
        rate, two = real(learning_rate), real(2)
        l2 = real(self._l2) + real(self._beta) / (two * rate)
        return rate, two * l2

    def update(
        self,
        parameters: NDArray,
        gradients: NDArray,
        slots: Sequence[NDArray],
        factors: Any,
        scratch: tuple[NDArray, NDArray],
    ) -> None:
        """See :class:`pserver.updates.rules.UpdateRule`."""
        rate, l2 = factors
        real = type(rate)
        step, root = scratch
        accumulator, linear = slots
        self._to_power(accumulator, root)
        np.multiply(gradients, gradients, out=step)
        accumulator += step
        linear += gradients
        if self._shrinkage:
            np.multiply(parameters, real(2 * self._shrinkage), out=step)
            linear += step
        self._to_power(accumulator, step)
        np.subtract(step, root, out=root)
        root /= rate
        root *= parameters
        linear -= root
        step /= rate
        step += l2
        np.clip(linear, real(-self._l1), real(self._l1), out=root)
        root -= linear
        np.divide(root, step, out=parameters)

    def _to_power(self, values: NDArray, out: NDArray) -> None:
        if self._power == 0.5:
            np.sqrt(values, out=out)
        else:
            np.power(values, values.dtype.type(self._power), out=out)


def make_row_rule(spec: TableSpec) -> UpdateRule:
    """Returns the rule of a table's optimizer. Its slots have ``[width]`` per row, except those of
    :data:`PER_ROW`.

    Raises:
        InvalidJob: names the table and the argument that rows do not support.
    """
    name, config = spec.optimizer["class_name"], spec.optimizer["config"]
    if name not in _KNOWN:
        known_names = ", ".join(_KNOWN)
        raise InvalidJob(f"table {spec.name!r} has optimizer {name}; expected one of {known_names}")
    if config.get("weight_decay"):
        raise InvalidJob(
            f"table {spec.name!r} has {name}(weight_decay={config['weight_decay']}), which would "
            "change every row at every step; only touched rows are updated: leave it out"
        )
    known = _KNOWN[name]
    for argument, value in config.items():
        if value and argument not in _COMMON | known:
            takes = ", ".join(sorted({"learning_rate", "clipvalue"} | known))
            raise InvalidJob(
                f"table {spec.name!r} has {name}({argument}={value!r}), which rows cannot have; "
                f"it takes {takes}"
            )
    try:
        if name == "RowwiseAdagrad":  # Keras has none
            check_arguments(name, config)
            return RowwiseAdagrad(config)
        check_optimizer({"class_name": name, "config": config})
        return Ftrl(config) if name == "Ftrl" else make_rule(spec.optimizer)
    except InvalidJob as error:
        raise InvalidJob(f"table {spec.name!r}: {error}") from None
