"""The data arguments of ``fit``, ``evaluate`` and ``predict``, checked and with Keras's meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidData, InvalidSetting
from psrpc.core.text import counted
from psrpc.ops.logs import get_logger
from worker.data.source import NO_LABELS, map_arrays
from worker.job import checks
from worker.stored.forms import check_lengths, in_arrays, unpacked
from worker.stored.kinds import Kind, check_ends, data_kind
from worker.stored.passes import Order
from worker.stored.py_dataset import measured

log = get_logger()

_BATCH_SIZE = 32
"""Keras's default."""


@dataclass(frozen=True)
class FitData:
    """Data of one ``fit``, ``evaluate`` or ``predict``, as :func:`worker.stored.stored_data.store`
    takes it.

    ``x`` is a nest of arrays and ``Ragged``, or the object that ``kind`` names: a
    ``keras.utils.PyDataset``, a ``tf.data.Dataset``, or one of the project's data sources.
    """

    kind: Kind
    x: Any
    y: Any = NO_LABELS
    weights: Any = None
    order: Order = "kept"
    batch_size: int | None = None
    """Records of a global batch; None for a ``tf.data.Dataset``, until it is stored."""
    records: int | None = None
    """Records of a pass; None as for ``batch_size``."""
    steps: int | None = None
    """Batches of an epoch, if given."""
    class_weight: Mapping[int, float] | None = None
    """Weights by class, as in :class:`worker.job.job.Job`."""

    def cut(self, epochs: int) -> FitData:
        """Returns the data without the batches of a ``tf.data.Dataset`` that ``epochs`` epochs of
        ``steps`` do not reach, since the dataset may be endless and not say so."""
        if self.kind != "dataset" or self.steps is None:
            return self
        return replace(self, x=self.x.take(self.steps * epochs))

    def sizes(self) -> EpochSizes:
        """Returns the sizes of an epoch; ``batch_size`` and ``records`` are known."""
        assert self.records is not None
        assert self.batch_size is not None
        return EpochSizes.of(self.records, self.batch_size, self.steps)


@dataclass(frozen=True)
class EpochSizes:
    """Sizes of the epochs: records of a pass and of an epoch, batches of an epoch, and records of a
    batch, of which the last of an epoch may have fewer."""

    pass_records: int
    records: int
    steps: int
    batch_size: int

    @classmethod
    def of(cls, pass_records: int, batch_size: int, steps: int | None) -> EpochSizes:
        """Returns the sizes for data with ``pass_records`` records, and epochs of ``steps``
        batches. As with Keras, an epoch ends early, with a warning, if the data does."""
        batches = -(-pass_records // batch_size)
        if steps is not None and steps > batches:
            log.warning(
                f"an epoch has {counted(batches, 'step')}, not {steps}: the data has "
                f"{counted(pass_records, 'record')}, {batch_size} in a batch"
            )
        if steps is None or steps >= batches:
            return cls(pass_records, pass_records, batches, batch_size)
        return cls(pass_records, steps * batch_size, steps, batch_size)


def training_data(
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    shuffle: bool | str = True,
    steps_per_epoch: int | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
) -> tuple[FitData, FitData | None]:
    """Returns the data to train on, and to validate on, from the arguments of ``keras.Model.fit``.

    Raises:
        InvalidData: data that workers cannot read, or whose parts do not fit each other; says how
            to pass it instead.
        InvalidSetting: a number is out of its range.
    """
    _check_numbers(
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        validation_batch_size=validation_batch_size,
        validation_steps=validation_steps,
    )
    if shuffle not in (True, False, "batch"):
        raise InvalidSetting(f"shuffle is {checks.show(shuffle)}; expected True, False or 'batch'")
    checks.check_class_weight(class_weight)
    given = _given("x", x, y, sample_weight)
    if class_weight is not None:
        _check_class_weight(given)
    validation: FitData | None = None
    if validation_data is not None:
        validation = _given("validation_data", *unpacked("validation_data", validation_data))
    elif validation_split:
        given, validation = _split(given, validation_split)
    order = _order(given.kind, shuffle)
    training = _sized(given, batch_size, steps_per_epoch)
    training = replace(training, order=order, class_weight=class_weight)
    if validation is not None:
        validation = _sized(validation, validation_batch_size or batch_size, validation_steps)
    return training, validation


def prediction_data(
    x: Any,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    y: Any = None,
    sample_weight: Any = None,
) -> FitData:
    """Returns the data of ``keras.Model.predict``, or of ``evaluate`` with ``y``, in its order.
    Raises as :func:`training_data`."""
    _check_numbers(batch_size=batch_size, steps=steps)
    return _sized(_given("x", x, y, sample_weight), batch_size, steps)


def _check_numbers(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            checks.check_integer(name, int(value) if isinstance(value, np.integer) else value, 1)


def _given(name: str, x: Any, y: Any, weights: Any) -> FitData:
    """Returns the data with its kind. ``name`` is the argument's, for messages."""
    kind = data_kind(name, x)
    if kind == "arrays":
        of_labels, of_weights = "y", "sample_weight"
        if name != "x":
            name, of_labels, of_weights = f"{name}[0]", f"{name}[1]", f"{name}[2]"
        parts = {name: in_arrays(name, x)}
        parts[of_labels] = NO_LABELS if y is None else in_arrays(of_labels, y)
        if weights is not None:
            parts[of_weights] = in_arrays(of_weights, weights)
            parts[of_weights] = _fitting_weights(of_weights, parts[of_weights], parts[of_labels])
        records = check_lengths(parts)
        x, y, weights = (*parts.values(), None)[:3]
        return FitData("arrays", x, y, weights, records=records)
    for other, value in (("y", y), ("sample_weight", weights)):
        if value is not None and value is not NO_LABELS:
            raise InvalidData(
                f"{other} is given, and {name} is a {type(x).__name__}, whose batches have their "
                f"own; leave {other} out"
            )
    if kind == "py_dataset":
        batch_size, records = measured(name, x)
        return FitData("py_dataset", x, records=records, batch_size=batch_size)
    if kind == "source":
        if not (records := x.num_records):
            raise InvalidData(f"{name} has 0 records; expected at least one")
        return FitData("source", x, records=records)
    check_ends(name, x)
    return FitData("dataset", x)


def _fitting_weights(name: str, weights: Any, y: Any) -> Any:
    """Returns the weights; for several outputs in the form of ``y``.

    Raises:
        InvalidData: there is not one for each output.
    """
    if not isinstance(y, dict | list | tuple):
        return weights
    if isinstance(weights, dict | list | tuple):
        if not _same_keys(weights, y):
            raise InvalidData(
                f"{name} and y have different parts; expected weights for each output, in the form "
                "of y"
            )
        return weights
    if weights.ndim > 2 or (weights.ndim == 2 and weights.shape[1] != 1):
        raise InvalidData(
            f"{name} has shape {list(weights.shape)} for several outputs; expected [records], or "
            "weights for each output, in the form of y"
        )
    return map_arrays(lambda _: weights, y)


def _same_keys(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_keys(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same_keys, one, other))
    return not isinstance(one, dict | list | tuple) and not isinstance(other, dict | list | tuple)


def _check_class_weight(data: FitData) -> None:
    if data.kind != "arrays":
        return  # found in the batches
    if data.weights is not None:
        raise InvalidData(
            "class_weight and sample_weight are given; leave one out, or multiply them"
        )
    if isinstance(data.y, dict | list | tuple):
        kind = "y has several outputs" if data.y else "there is no y"
        raise InvalidData(
            f"class_weight is given, but {kind}; it needs one class for each record: give "
            "sample_weight"
        )


def _split(data: FitData, fraction: float) -> tuple[FitData, FitData]:
    """Returns all but the last ``fraction`` of the records, and those."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise InvalidSetting(
            f"validation_split is {checks.show(fraction)}; expected a number from 0 to 1"
        )
    if data.kind != "arrays":
        raise InvalidData(
            f"validation_split is {fraction}, and x is a {type(data.x).__name__}; only arrays are "
            "split: give validation_data"
        )
    assert data.records is not None
    at = math.floor(data.records * (1.0 - fraction))
    if at in (0, data.records):
        raise InvalidData(
            f"validation_split is {fraction} of {counted(data.records, 'record')}, which leaves "
            f"{at} to train on and {data.records - at} to validate on; expected some of both"
        )

    def cut(low: int, high: int) -> FitData:
        nests = [map_arrays(lambda a: a[low:high], nest) for nest in (data.x, data.y)]
        weights = data.weights
        if weights is not None:
            weights = map_arrays(lambda a: a[low:high], weights)
        return replace(data, x=nests[0], y=nests[1], weights=weights, records=high - low)

    return cut(0, at), cut(at, data.records)


def _order(kind: str, shuffle: bool | str) -> Order:
    if not shuffle or kind == "dataset":
        return "kept"  # a dataset shuffles itself
    if kind == "py_dataset":
        return "batches"
    return "within_batches" if shuffle == "batch" else "shuffled"


def _sized(data: FitData, batch_size: int | None, steps: int | None) -> FitData:
    """Returns the data with its batch size, by Keras's rules."""
    if data.kind in ("dataset", "py_dataset"):
        return replace(data, steps=steps)
    assert data.records is not None
    if batch_size is None:
        by_steps = data.kind == "arrays" and steps is not None
        batch_size = -(-data.records // steps) if by_steps and steps else _BATCH_SIZE
    return replace(data, batch_size=int(batch_size), steps=steps)
