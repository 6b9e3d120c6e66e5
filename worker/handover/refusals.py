"""Refuses models that a cluster would treat in another way than Keras does."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from pserver.updates.allowlist import check_optimizer
from psrpc.core.errors import InvalidData, InvalidJob
from worker.data.source import Batch, arrays_of
from worker.embedding.model_tables import check_trained
from worker.embedding.table_options import plain_json
from worker.model.compiled import check_supported, overrides_loss
from worker.model.loss_scale import inner

_NOT_CALLED = {
    "compile": "no other process can repeat what it does; set its attributes in __init__, and give "
    "losses and metrics to keras.Model.compile",
    "get_metrics_result": "results are those of the metrics; give a metric of that value to "
    "compile()",
}

_JOINED = (
    "results of several processes are joined by the states of metrics; give metrics to compile(), "
    "or call evaluate outside of the cluster"
)
_NOT_EVALUATED = {
    "compile": _NOT_CALLED["compile"],
    **dict.fromkeys(("test_step", "make_test_function", "compute_metrics"), _JOINED),
}


_LABELS = {
    "y": "give fit x and y, or a dataset of pairs (x, y)",
    "validation_data": "give a pair (x, y), or a dataset of such",
}


def check_fit_model(model: keras.Model) -> None:
    """Refuses a model before anything starts, by the name of its method, argument or layer. Checks
    that need data or the number of shards follow in ``worker describe``.

    Raises:
        InvalidJob: the model is not compiled, or its class, arguments of ``compile``, optimizer or
            layers ask for something that workers do not do; the message names a replacement.
    """
    _check_is_model(model, "fit")
    if not model.compiled or model.optimizer is None:
        lacking = "has no optimizer" if model.compiled else "is not compiled"
        raise InvalidJob(
            f"model {model.name!r} {lacking}; call model.compile(optimizer, loss, ...) before fit"
        )
    _check_not_overridden(model, _NOT_CALLED)
    check_supported(model)
    check_optimizer(plain_json(keras.optimizers.serialize(inner(model.optimizer))))


def check_has_labels(model: keras.Model, name: str, records: Batch) -> None:
    """Refuses data without labels where the model's loss needs them.

    Args:
        model: compiled.
        name: the argument that gives the labels.
        records: some of the data.

    Raises:
        InvalidData: there are none.
    """
    needed = model._compile_loss is not None and not overrides_loss(model)
    if needed and not any(True for _ in arrays_of(records[1])):
        raise InvalidData(
            f"{name} has no labels, and model {model.name!r} is compiled with a loss, which needs "
            f"them; {_LABELS[name]}"
        )


def check_evaluate_model(model: keras.Model) -> None:
    """Refuses a model whose ``evaluate`` does not follow from its loss and metrics. Raises as
    :func:`check_fit_model`."""
    _check_is_model(model, "evaluate")
    if not model.compiled:
        raise InvalidJob(
            f"model {model.name!r} is not compiled; call model.compile(loss=...) before evaluate"
        )
    _check_not_overridden(model, _NOT_EVALUATED)
    check_trained(model, "evaluate")


def check_predict_model(model: keras.Model) -> None:
    """Refuses an object that is no model, and a model with tables without rows. Raises as
    :func:`check_fit_model`."""
    _check_is_model(model, "predict")
    check_trained(model, "predict")


def _check_is_model(model: object, method: str) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidJob(f"model is a {type(model).__name__}; {method} takes a keras.Model")


def _check_not_overridden(model: keras.Model, names: Mapping[str, str]) -> None:
    kind = type(model)
    for name, instead in names.items():
        if getattr(kind, name) is not getattr(keras.Model, name):
            raise InvalidJob(
                f"{kind.__name__} overrides {name}(), which workers do not call; {instead}",
                code="PS108",
            )
