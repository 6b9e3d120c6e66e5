"""The table options of a ``worker.Embedding``, and the plan's description of the table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import keras
import numpy as np
import numpy.typing as npt

from pserver.tables.rules import make_row_rule
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import OPTIMIZERS, Eviction, TableSpec

_INITIALIZERS = {
    "RandomUniform": ("uniform", {"minval": "low", "maxval": "high"}),
    "RandomNormal": ("normal", {"mean": "mean", "stddev": "stddev"}),
    "Constant": ("constant", {"value": "value"}),
}


@dataclass(frozen=True)
class TableOptions:
    """One table, as a layer describes it; see :class:`worker.embedding.embedding.Embedding`.

    ``initializer`` is that of :class:`psrpc.core.tables.TableSpec`; ``optimizer`` is serialized. An
    ``optimizer`` or ``seed`` of None means the job's. ``layer`` is the name of the describing
    layer, for messages.
    """

    name: str
    width: int
    vocabulary: int | None
    initializer: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    min_count: int
    max_rows: int | None
    eviction: Eviction | None
    keep_evicted: bool
    seed: int | None
    layer: str = field(compare=False)

    def rows_of(
        self, tables: Mapping[str, npt.NDArray[np.float32]], grown: Collection[str] = ()
    ) -> npt.NDArray[np.float32]:
        """Returns all rows of the table from the ``tables`` of a checkpoint.

        Args:
            grown: names of growing tables, see :func:`worker.export.tables.whole_tables`.

        Raises:
            InvalidJob: the table is missing, or has another shape; with PS405.
        """
        rows = tables.get(self.name)
        growing = self.vocabulary is None
        known = None if rows is None else (None if growing else len(rows), rows.shape[1])
        own = (self.vocabulary, self.width)
        if rows is None or known != own or growing != (self.name in grown):
            there = ", ".join(
                f"{name!r} of {'a growing number of' if name in grown else t.shape[0]} rows of "
                f"{t.shape[1]}"
                for name, t in tables.items()
            )
            mine = "a growing number of" if growing else self.vocabulary
            raise InvalidJob(
                f"layer {self.layer!r} has table {self.name!r} of {mine} rows of {self.width}, and "
                f"the checkpoint has {there or 'no table'}; export with the job that wrote it",
                code="PS405",
            )
        return rows

    def spec(self, optimizer: Mapping[str, Any], seed: int) -> TableSpec:
        """Returns the table of the plan.

        Args:
            optimizer: the job's, serialized.
            seed: the job's.

        Raises:
            InvalidJob: the chosen optimizer cannot update rows.
        """
        chosen = self.optimizer or optimizer
        spec = TableSpec(
            name=self.name,
            width=self.width,
            vocabulary=self.vocabulary,
            initializer=dict(self.initializer),
            optimizer={"class_name": chosen["class_name"], "config": dict(chosen["config"])},
            seed=seed if self.seed is None else self.seed,
            min_count=self.min_count,
            max_rows=self.max_rows,
            eviction=self.eviction,
            keep_evicted=self.keep_evicted,
        )
        try:
            make_row_rule(spec)
        except InvalidJob as error:
            if self.optimizer is not None:
                raise
            raise InvalidJob(
                f"{error}; that is the job's optimizer: give layer {self.layer!r} one of its own "
                "with optimizer=..."
            ) from None
        return spec


def tables_of(options: Iterable[TableOptions]) -> list[TableOptions]:
    """Returns each table once, in the order of first mention.

    Raises:
        InvalidJob: two layers give a table different options; names both.
    """
    tables: dict[str, TableOptions] = {}
    for each in options:
        first = tables.setdefault(each.name, each)
        if first != each:
            raise InvalidJob(
                f"layers {first.layer!r} and {each.layer!r} both name table {each.name!r}, but "
                f"{_difference(first, each)}; make them agree, or name another table"
            )
    return list(tables.values())


def plain_json(value: Any) -> Any:
    """Returns ``value`` without numpy scalars and tuples, which JSON does not support."""
    if isinstance(value, dict):
        return {key: plain_json(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


def _difference(first: TableOptions, second: TableOptions) -> str:
    for each in fields(TableOptions):
        one, other = getattr(first, each.name), getattr(second, each.name)
        if each.compare and one != other:
            return f"{each.name} is {one!r} in the first and {other!r} in the second"
    raise AssertionError("they are equal")


def same_tables(mine: Sequence[TableOptions], plan: Sequence[TableSpec]) -> str:
    """Returns the first difference between this model's tables and the plan's; empty if none."""
    theirs = {table.name: table for table in plan}
    for each in mine:
        other = theirs.pop(each.name, None)
        if other is None:
            return f"table {each.name!r} is only here"
        if (each.width, each.vocabulary) != (other.width, other.vocabulary):
            return (
                f"table {each.name!r} has width {each.width} and vocabulary {each.vocabulary} "
                f"here, {other.width} and {other.vocabulary} there"
            )
    return f"table {next(iter(theirs))!r} is only there" if theirs else ""


def table_initializer(layer: str, initializer: Any) -> dict[str, Any]:
    """Converts a Keras initializer, or its name, to that of :class:`psrpc.core.tables.TableSpec`.

    Raises:
        InvalidJob: the initializer does not work for single rows.
    """
    if isinstance(initializer, type):
        initializer = initializer()
    if isinstance(initializer, str):
        try:
            initializer = keras.initializers.get(initializer)
        except ValueError:
            raise InvalidJob(
                f"layer {layer!r} has initializer {initializer!r}; Keras has none of that name"
            ) from None
    name = type(initializer).__name__
    if name in ("Zeros", "Ones"):
        return {"class_name": "constant", "config": {"value": float(name == "Ones")}}
    if name not in _INITIALIZERS:
        raise InvalidJob(
            f"layer {layer!r} has initializer {name}; rows are initialized one by one, with "
            "RandomUniform, RandomNormal, Constant, Zeros or Ones"
        )
    known, arguments = _INITIALIZERS[name]
    config = {mine: float(initializer.get_config()[theirs]) for theirs, mine in arguments.items()}
    if not all(map(math.isfinite, config.values())):
        raise InvalidJob(
            f"layer {layer!r} has initializer {name} with {config}; expected finite numbers"
        )
    return {"class_name": known, "config": config}


def table_optimizer(layer: str, optimizer: Any) -> dict[str, Any] | None:
    """Returns a table's optimizer as ``keras.optimizers.serialize`` writes it; None is the job's.

    Raises:
        InvalidJob: it cannot update rows.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, RowwiseAdagrad):
        return cast("dict[str, Any]", plain_json(optimizer.serialized()))
    if isinstance(optimizer, Mapping):
        serialized = {"class_name": optimizer["class_name"], "config": dict(optimizer["config"])}
    else:
        if isinstance(optimizer, str):
            try:
                optimizer = keras.optimizers.get(optimizer)
            except ValueError:
                raise InvalidJob(
                    f"layer {layer!r} has optimizer {optimizer!r}; Keras has none of that name"
                ) from None
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise InvalidJob(
                f"layer {layer!r} has optimizer {optimizer!r}; expected one of Keras's, or its name"
            )
        serialized = plain_json(keras.optimizers.serialize(optimizer))
    if serialized["class_name"] not in OPTIMIZERS:
        raise InvalidJob(
            f"layer {layer!r} has optimizer {serialized['class_name']}, which has no form for "
            f"rows; expected {', '.join(OPTIMIZERS)}"
        )
    return {"class_name": serialized["class_name"], "config": serialized["config"]}


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator per row, which sums the means of its squared gradients, as in
    DLRM (Naumov et al. 2019) and FBGEMM. For ``worker.Embedding(optimizer=...)``.

    For a row w with gradient g and accumulator s::

        s ← s + mean(g²);   w ← w − learning_rate · g / (√s + epsilon)

    The defaults are FBGEMM's, but ``learning_rate`` has Keras's; it is a number, or a schedule of
    ``keras.optimizers.schedules``.
    """

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def serialized(self) -> dict[str, Any]:
        """Returns the optimizer in the form of ``keras.optimizers.serialize``.

        Raises:
            InvalidJob: the learning rate is neither a number nor a schedule.
        """
        config = dict(vars(self))
        if not isinstance(self.learning_rate, int | float):
            schedules = keras.optimizers.schedules
            if not isinstance(self.learning_rate, schedules.LearningRateSchedule):
                raise InvalidJob(
                    f"RowwiseAdagrad has learning_rate {self.learning_rate!r}; expected a number "
                    "or a schedule of keras.optimizers.schedules"
                )
            config["learning_rate"] = schedules.serialize(self.learning_rate)
        return {"class_name": "RowwiseAdagrad", "config": config}
