"""Makes a job's metrics, and tests whether their states add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from psrpc.core.errors import InvalidJob
from worker.data.source import Batch
from worker.job.checks import required_arguments
from worker.job.job import Job
from worker.job.loader import user_code
from worker.job.output_names import by_output, weights_as_outputs
from worker.model import keras_names
from worker.model.build import BY_OUTPUT, kind_of_labels, layer_metrics
from worker.model.labels import counting

PART = 8
"""Number of records of each of the two test batches of :func:`not_summable`."""


def build_metrics(job: Job, model: Any, y_true: Any, y_pred: Any) -> list[Any]:
    """Returns new metrics (``keras.metrics.Metric``) of a job, in its order.

    ``accuracy`` means binary, sparse or categorical accuracy by the shapes of ``y_true`` and
    ``y_pred`` (anything with a ``shape``), as in ``keras.Model.compile``. For several outputs, and
    for a model that is compiled with ``weighted_metrics``, the only metric is Keras's own
    collection, whose results are named ``OUTPUT_metric``.

    Raises:
        InvalidJob: Keras has no metric of a name, or two metrics have the same name.
    """
    several = isinstance(job.metrics, dict) or not hasattr(y_pred, "shape")
    if (several and job.metrics and model.compiled) or weighs_metrics(model):
        return [metric for metric in model.metrics if metric.name == BY_OUTPUT]
    # As in Keras, a list within the list has the metrics of the only output.
    metrics = [_metric(metric, y_true, y_pred) for metric in keras.tree.flatten(job.metrics)]
    tracked = [metric.name for metric in layer_metrics(model)]
    names = ["loss", *tracked, *(metric.name for metric in metrics)]
    for name in names:
        if names.count(name) > 1:
            where = ""
            if name in tracked:
                where = (
                    f": the model or one of its layers keeps a metric of this name, a "
                    f"keras.metrics.Metric(name={name!r}) in an attribute"
                )
            if name in tracked and name == "loss":
                where += ", as is done for a train_step; the loss is reported without it: remove it"
            raise InvalidJob(f"two metrics are named {name!r}{where}; give them different names")
    return metrics


def weighs_metrics(model: Any) -> bool:
    """Whether a model is compiled with ``weighted_metrics``, which take the sample weights."""
    if not isinstance(model, keras.Model) or not model.compiled:
        return False
    return bool(model._compile_config.config.get("weighted_metrics"))


def counted_by(metric: Any, model: Any, batch: Batch, outputs: Any) -> tuple[Any, ...]:
    """Returns the arguments of ``update_state`` for a metric of :func:`build_metrics`. Sample
    weights are for ``weighted_metrics`` alone, as in Keras."""
    if metric.name == BY_OUTPUT and len(batch) > 2 and weighs_metrics(model):
        return batch[1], outputs, weights_as_outputs(model, outputs, batch[2])
    return batch[1], outputs


def _metric(metric: Any, y_true: Any, y_pred: Any) -> Any:
    if isinstance(metric, str):
        if metric.lower() in ("accuracy", "acc"):
            return _accuracy(metric, y_true, y_pred)
        made = keras_names.get("metric", metric)
        if not isinstance(made, keras.metrics.Metric):
            return keras.metrics.MeanMetricWrapper(made, name=metric)
        made.name = metric
        return made
    if metric is None:
        raise InvalidJob("metrics contains None; leave it out")
    if isinstance(metric, keras.metrics.Metric):
        return made_anew(metric)
    name = getattr(metric, "__name__", type(metric).__name__)
    if not required_arguments(metric):
        with user_code(f"metric {name}()"):
            made = metric()
        if not isinstance(made, keras.metrics.Metric):
            raise InvalidJob(f"metric {name}() made a {type(made).__name__}; expected a metric")
        return made
    return keras.metrics.MeanMetricWrapper(metric, name=name)


def made_anew(metric: Any) -> Any:
    """Returns a fresh copy, because the job file's own metric may be in use elsewhere in the
    process.

    Raises:
        InvalidJob: its config does not make the same metric.
    """
    if type(metric) is keras.metrics.MeanMetricWrapper:
        # Its config names the function, which Keras finds only if it is registered.
        policy, options = metric._dtype_policy, metric._fn_kwargs
        return keras.metrics.MeanMetricWrapper(metric._fn, metric.name, policy, **options)
    lost = ""
    try:
        made = type(metric).from_config(metric.get_config())
    except (NotImplementedError, TypeError, ValueError):
        made = None
    else:
        # A config may lack constructor arguments, even in Keras.
        lost = next((name for name in vars(metric) if _differs(metric, made, name)), "")
    if made is None or lost:
        without = f", which leaves out {lost.lstrip('_')}" if lost else ""
        raise InvalidJob(
            f"metric {metric.name!r} cannot be made anew from its config{without}; give a function "
            f"without arguments that makes it, such as lambda: {type(metric).__name__}(...)"
        )
    return made


def _differs(metric: Any, made: Any, name: str) -> bool:
    """Whether an attribute of plain values differs in the copy."""
    # Not part of a metric's configuration.
    if name in ("built", "_built"):
        return False
    one, other = getattr(metric, name), getattr(made, name, None)
    plain = (bool, int, float, str, type(None), np.ndarray)
    comparable = all(isinstance(part, plain) for part in keras.tree.flatten(one))
    return comparable and repr(one) != repr(other)


def _accuracy(name: str, y_true: Any, y_pred: Any) -> Any:
    kinds = {
        "binary": keras.metrics.BinaryAccuracy,
        "sparse_categorical": keras.metrics.SparseCategoricalAccuracy,
        "categorical": keras.metrics.CategoricalAccuracy,
    }
    return kinds[kind_of_labels(name, y_true, y_pred)](name=name)


def naming_metric(
    job: Job, model: Any, metric: Any, y_true: Any, y_pred: Any
) -> AbstractContextManager[None]:
    """Returns a context that adds the name of a metric of :func:`build_metrics`, and the shapes, to
    errors; see :func:`worker.model.labels.counting`."""
    several = metric.name == BY_OUTPUT
    given = by_output(model, y_pred, job.metrics) if several else None
    return counting(metric.name, y_true, y_pred, given)


def not_summable(metrics: Sequence[Any], updates: Sequence[Callable[[], None]]) -> list[Any]:
    """Returns the ``metrics`` whose state after both ``updates`` is not the sum of the states after
    each, such as a running maximum. Leaves their states unchanged.

    A state that happens to be zero after one of the updates proves nothing.

    Args:
        updates: each counts one batch in all metrics, whose variables exist already.
    """
    states = []
    for which in ((0,), (1,), (0, 1)):
        with keras.StatelessScope():
            for metric in metrics:
                metric.reset_state()
            for index in which:
                updates[index]()
            states.append([_state(metric) for metric in metrics])
    first, second, both = states
    return [
        metric
        for metric, one, other, whole in zip(metrics, first, second, both, strict=True)
        if not _adds_up(one, other, whole)
    ]


def is_kerass_own(metric: Any) -> bool:
    """Whether Keras defines the class of ``metric``; all such metrics add up."""
    return type(metric).__module__.partition(".")[0] == "keras"


def parts(metrics: Sequence[Any]) -> list[Any]:
    """Returns ``metrics`` with Keras's collection for several outputs replaced by its members."""
    found: list[Any] = []
    for metric in metrics:
        found += metric.metrics if metric.name == BY_OUTPUT else [metric]
    return found


def summable_results(metric: Any, names: Sequence[str]) -> list[str]:
    """Returns those of ``names`` that may be results of ``metric``: its own name, maybe after the
    name of an output."""
    return [n for n in names if n == metric.name or n.endswith(f"_{metric.name}")]


def _state(metric: Any) -> list[np.ndarray]:
    # A copy, since the tensor may share the variable's memory.
    return [variable.value.numpy().astype(np.float64) for variable in metric.variables]


def _adds_up(one: list[np.ndarray], other: list[np.ndarray], both: list[np.ndarray]) -> bool:
    return all(
        np.allclose(a + b, whole, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b, whole in zip(one, other, both, strict=True)
    )
