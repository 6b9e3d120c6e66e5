"""Builds the metrics of a job."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from psrpc.core.errors import InvalidJob
from worker.job.checks import required_arguments
from worker.job.job import Job
from worker.job.loader import user_code
from worker.model import keras_names
from worker.model.build import BY_OUTPUT, kind_of_labels, layer_metrics


def build_metrics(job: Job, model: Any, y_true: Any, y_pred: Any) -> list[Any]:
    """Returns new metrics (``keras.metrics.Metric``) of a job, in its order.

    ``accuracy`` means binary, sparse or categorical accuracy by the shapes of ``y_true`` and
    ``y_pred`` (anything with a ``shape``), as in ``keras.Model.compile``. For several outputs the
    only metric is Keras's own collection, whose results are named ``OUTPUT_metric``.

    Raises:
        InvalidJob: Keras has no metric of a name, or two metrics have the same name.
    """
    several = isinstance(job.metrics, dict) or not hasattr(y_pred, "shape")
    if several and job.metrics and model.compiled:
        return [metric for metric in model.metrics if metric.name == BY_OUTPUT]
    # A list in a list is that of the only output, as in Keras.
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
        return _anew(metric)
    name = getattr(metric, "__name__", type(metric).__name__)
    if not required_arguments(metric):
        with user_code(f"metric {name}()"):
            made = metric()
        if not isinstance(made, keras.metrics.Metric):
            raise InvalidJob(f"metric {name}() made a {type(made).__name__}; expected a metric")
        return made
    return keras.metrics.MeanMetricWrapper(metric, name=name)


def _anew(metric: Any) -> Any:
    """Returns a fresh copy, because the job file's own metric may be in use elsewhere in the
    process."""
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
