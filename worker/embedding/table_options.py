"""What a ``worker.Embedding`` says of its table, and the plan's description of it."""

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

    ``initializer`` is that of :class:`psrpc.core.tables.TableSpec`; ``optimizer`` is serialized,
    None is the job's. ``layer`` is the name of the layer that says so, for messages."""

    name: str
    width: int
    vocabulary: int | None
    initializer: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    min_count: int
    max_rows: int | None
    eviction: Eviction | None
    keep_evicted: bool
    layer: str = field(compare=False)

    def rows_of(
        self, tables: Mapping[str, npt.NDArray[np.float32]], grown: Collection[str] = ()
    ) -> npt.NDArray[np.float32]:
        """All rows of the table of those of a checkpoint, of which some have ``grown``, see
        :func:`worker.export.tables.whole_tables`.

        Raises:
            InvalidJob: it is not there, or has another shape; with PS405.
        """
        rows = tables.get(self.name)
        growing = self.vocabulary is None
        known = None if rows is None else (None if growing else len(rows), rows.shape[1])
        if (
            rows is None
            or known != (self.vocabulary, self.width)
            or growing != (self.name in grown)
        ):
            there = ", ".join(
                f"{name!r} of {'a growing number of' if name in grown else t.shape[0]} rows of "
                f"{t.shape[1]}"
                for name, t in tables.items()
            )
            mine = "a growing number of" if self.vocabulary is None else self.vocabulary
            raise InvalidJob(
                f"layer {self.layer!r} has table {self.name!r} of {mine} rows of {self.width}, and "
                f"the checkpoint has {there or 'no table'}; export with the job that wrote it",
                code="PS405",
            )
        return rows

    def spec(self, optimizer: Mapping[str, Any], seed: int) -> TableSpec:
        """For the plan.

        Args:
            optimizer: the job's, serialized.

        Raises:
            InvalidJob: the optimizer that it comes to cannot update rows.
        """
        chosen = self.optimizer or optimizer
        spec = TableSpec(
            name=self.name,
            width=self.width,
            vocabulary=self.vocabulary,
            initializer=dict(self.initializer),
            optimizer={"class_name": chosen["class_name"], "config": dict(chosen["config"])},
            seed=seed,
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
    """Each table once, in the order in which they are first named.

    Raises:
        InvalidJob: two layers say different things of one table; names both.
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


def _difference(first: TableOptions, second: TableOptions) -> str:
    for each in fields(TableOptions):
        one, other = getattr(first, each.name), getattr(second, each.name)
        if each.compare and one != other:
            return f"{each.name} is {one!r} in the first and {other!r} in the second"
    raise AssertionError("they are equal")


def same_tables(mine: Sequence[TableOptions], plan: Sequence[TableSpec]) -> str:
    """In what this model's tables differ from the plan's; empty where they do not."""
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
    """A Keras initializer, or its name, as :class:`psrpc.core.tables.TableSpec` has it.

    Raises:
        InvalidJob: rows cannot be initialized so.
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
    """An optimizer of a table as ``keras.optimizers.serialize`` writes it; None is the job's.

    Raises:
        InvalidJob: it cannot update rows.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, RowwiseAdagrad):
        return cast("dict[str, Any]", _plain(optimizer.serialized()))
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
        serialized = _plain(keras.optimizers.serialize(optimizer))
    if serialized["class_name"] not in OPTIMIZERS:
        raise InvalidJob(
            f"layer {layer!r} has optimizer {serialized['class_name']}, which has no form for "
            f"rows; expected {', '.join(OPTIMIZERS)}"
        )
    return {"class_name": serialized["class_name"], "config": serialized["config"]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator for each row, to which the mean of its squared gradients is
    added: as in DLRM (Naumov et al. 2019) and FBGEMM. For ``worker.Embedding(optimizer=...)``.

    Of a row w with gradient g, and with s for the accumulator::

        s ← s + mean(g²);   w ← w − learning_rate · g / (√s + epsilon)

    The defaults are FBGEMM's, but for ``learning_rate``, which is Keras's. It is a number, or a
    schedule of ``keras.optimizers.schedules``.
    """

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def serialized(self) -> dict[str, Any]:
        """As ``keras.optimizers.serialize`` writes its own.

        Raises:
            InvalidJob: the learning rate is neither a number nor a schedule.
        """
        config = dict(vars(self))
        if not isinstance(self.learning_rate, int | float):
            from keras.optimizers import schedules

            if not isinstance(self.learning_rate, schedules.LearningRateSchedule):
                raise InvalidJob(
                    f"RowwiseAdagrad has learning_rate {self.learning_rate!r}; expected a number "
                    "or a schedule of keras.optimizers.schedules"
                )
            config["learning_rate"] = schedules.serialize(self.learning_rate)
        return {"class_name": "RowwiseAdagrad", "config": config}
