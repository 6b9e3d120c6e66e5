"""Refuses models that a cluster's ``fit`` would train in another way than Keras's."""

from __future__ import annotations

import keras

from pserver.updates.allowlist import check_optimizer
from psrpc.core.errors import InvalidJob
from worker.embedding.embedding import Embedding
from worker.embedding.table_options import plain_json
from worker.model.compiled import check_supported
from worker.model.loss_scale import inner

_NOT_CALLED = {
    "compile": "no other process can repeat what it does; set its attributes in __init__, and give "
    "losses and metrics to keras.Model.compile",
    "get_metrics_result": "results are those of the metrics; give a metric of that value to "
    "compile()",
}


def check_fit_model(model: keras.Model) -> None:
    """Refuses a model before anything starts, by the name of its method, argument or layer. What
    needs data or the number of shards, ``worker describe`` refuses later.

    Raises:
        InvalidJob: the model is not compiled, or its class, arguments of ``compile``, optimizer or
            layers ask for what workers do not do; the message says what to write instead.
    """
    if not isinstance(model, keras.Model):
        raise InvalidJob(f"model is a {type(model).__name__}; fit takes a keras.Model")
    if not model.compiled or model.optimizer is None:
        lacking = "has no optimizer" if model.compiled else "is not compiled"
        raise InvalidJob(
            f"model {model.name!r} {lacking}; call model.compile(optimizer, loss, ...) before fit"
        )
    kind = type(model)
    for name, instead in _NOT_CALLED.items():
        if getattr(kind, name) is not getattr(keras.Model, name):
            raise InvalidJob(
                f"{kind.__name__} overrides {name}(), which workers do not call; {instead}",
                code="PS108",
            )
    check_supported(model)
    for layer in model._flatten_layers():
        if isinstance(layer, Embedding):
            raise InvalidJob(
                f"layer {layer.name!r} is a pserver.Embedding, whose rows only a job has; write a "
                "job file (docs/jobs.md), or take keras.layers.Embedding",
                code="PS108",
            )
    check_optimizer(plain_json(keras.optimizers.serialize(inner(model.optimizer))))
