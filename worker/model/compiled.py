"""Completes a job from its Keras model: arguments of ``compile`` and overridden methods.

Keras trains with the arguments of ``compile``, through ``train_step``. A worker has its own
training step, so this module takes over each of them or refuses it by name before training begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from psrpc.core.errors import InvalidJob
from worker.data.ragged import as_tensor
from worker.data.source import Batch, map_arrays
from worker.embedding.lookups import NoRows, look_up
from worker.job.job import Job
from worker.job.loader import user_code
from worker.job.output_names import (
    by_output,
    check_label_names,
    check_output_names,
    check_weight_names,
)
from worker.model.build import build_loss, build_model
from worker.model.inputs import calling, check_input_names
from worker.model.keras_names import check_names, made_losses
from worker.model.labels import (
    check_labels_by_output,
    check_weights_by_output,
    loss_name,
    naming_losses,
)
from worker.model.loss_scale import initial_scale, inner

_NOT_RUN = {
    "fit": "give what it sets to the job, and prepare data in map= of the data source",
    "evaluate": "evaluations compute the job's loss and metrics; give those",
    "train_step": "write the forward pass in call(), a loss of its own in compute_loss()",
    "test_step": "evaluations compute the job's loss and metrics; give those",
    "make_train_function": "workers compile the step themselves",
    "make_test_function": "workers compile the evaluation themselves",
    "compute_metrics": "give metrics to the job, as metrics=[...]",
}
"""Methods that workers never call -> a replacement. Methods for prediction may be overridden."""


def complete(job: Job, example: Batch) -> tuple[Job, Any]:
    """Builds the model of a job, and takes missing fields of the job from its ``compile``.

    Returns:
        The job with its loss, optimizer and metrics; and the model, which is compiled with them
        only if Keras computes the loss (nested outputs, or the model's own ``compute_loss``).

    Raises:
        InvalidJob: the model cannot be built; it overrides a method that workers do not call, or
            is compiled with an argument that they do not support; the job and ``compile`` give
            different losses, optimizers or metrics; or neither gives a loss or an optimizer.
    """
    model = build_model(job, example)
    with user_code("train"):
        check_input_names(model, example[0])
    compiled = _compile_arguments(model)
    own = [name for name in _MEASURES if _given(getattr(job, name))]
    job = completed(job, model)
    if isinstance(model, keras.Model):
        _complete(job, model, compiled, own, example)
    return job, model


def _complete(
    job: Job, model: keras.Model, compiled: Mapping[str, Any], own: Sequence[str], example: Batch
) -> None:
    outputs = _outputs(model, example)
    if not overrides_loss(model):
        check_output_names(job, model, outputs, own)
        with user_code("train"):
            check_label_names(job, model, outputs, example[1])
    if not model.compiled and not _needs_compile(job, model, outputs):
        return
    measures = {name: getattr(job, name) for name in _MEASURES}
    if any(compiled.get(name) is not value for name, value in measures.items()):
        with user_code("compile()"):
            weighted = compiled.get("weighted_metrics")
            model.compile(compiled.get("optimizer"), **measures, weighted_metrics=weighted)
    # Keras makes the trackers of losses and metrics of outputs on first use.
    records = map_arrays(as_tensor, example)
    with calling(model, example[0]), look_up(NoRows()), keras.StatelessScope():
        outputs = model(records[0], training=False)
    losses: dict[Any, Any] = {}
    if not overrides_loss(model):
        losses = by_output(model, outputs, job.loss)
        labels = by_output(model, outputs, example[1])
        with user_code("train"):
            check_labels_by_output(losses, labels, by_output(model, outputs, outputs))
            check_sample_weights(job, model, outputs, example)
    with naming_losses(losses), look_up(NoRows()):
        build_loss(job, model)(records, outputs, training=False)


def check_sample_weights(job: Job, model: keras.Model, outputs: Any, batch: Batch) -> None:
    """Refuses sample weights whose names or shapes do not match the outputs that have losses; see
    :func:`worker.model.labels.check_weights`. A model's own ``compute_loss`` may take any. Raises
    InvalidJob, which names the output and the expected shape."""
    if len(batch) < 3 or overrides_loss(model):
        return
    check_weight_names(job, model, outputs, batch[2])
    losses, weights = (by_output(model, outputs, each) for each in (job.loss, batch[2]))
    check_weights_by_output(losses, weights, by_output(model, outputs, outputs))


_MEASURES = ("loss", "loss_weights", "metrics")


def _needs_compile(job: Job, model: keras.Model, outputs: Any) -> bool:
    """Whether Keras computes the loss, which it does by its own rules for nested outputs."""
    if overrides_loss(model) or isinstance(job.metrics, dict) or job.loss_weights is not None:
        return True
    return any(isinstance(nest, dict | list | tuple) for nest in (job.loss, outputs))


def _outputs(model: keras.Model, example: Batch) -> Any:
    """Returns the outputs of a model, symbolic if it is functional."""
    if symbolic := getattr(model, "outputs", None):
        # A sequential model has no output before its first call.
        return getattr(model, "output", symbolic if len(symbolic) > 1 else symbolic[0])
    with calling(model, example[0]), keras.StatelessScope(), look_up(NoRows()):
        return model(map_arrays(as_tensor, example[0]), training=False)


def completed(job: Job, model: Any) -> Job:
    """Returns the job with missing fields from ``model.compile``. Raises as :func:`complete`."""
    compiled = _compile_arguments(model)
    if isinstance(model, keras.Model):
        job = replace(job, loss=made_losses(job.loss))
        check_supported(model)
    chosen: dict[str, Any] = {}
    for name in ("optimizer", "loss", "loss_weights", "metrics"):
        own, other = getattr(job, name), compiled.get(name)
        differ = own is not other and _given(own) and _given(other)
        if differ and _canonical(name, own) != _canonical(name, other):
            raise InvalidJob(
                f"{name} is {_shown(own)} in the job and {_shown(other)} in compile() of the "
                f"model; give it in one of the two places{_DEFAULTS.get(name, '')}",
                code="PS108",
            )
        if not _given(own) and _given(other):
            chosen[name] = made_losses(other) if name == "loss" else other
    completed = replace(job, **chosen) if chosen else job
    if completed.optimizer is None:
        raise InvalidJob(f"the job has no optimizer; {_WHERE.format('optimizer')}")
    if completed.loss is None and not overrides_loss(model):
        raise InvalidJob(f"the job has no loss; {_WHERE.format('loss')}")
    if isinstance(model, keras.Model):
        check_names(completed)
    return completed


_WHERE = "give Job({0}=...), or compile the model with compile({0}=...)"
_DEFAULTS = {
    "optimizer": " (compile() takes rmsprop where it is given none; optimizer=None is none)"
}


def check_supported(model: keras.Model) -> None:
    """Refuses methods, layers and arguments of ``compile`` that workers do not follow, by name.

    Raises:
        InvalidJob: names the method, layer or argument, and a replacement.
    """
    _check_methods(model)
    _check_layers(model)
    _check_arguments(_compile_arguments(model))


def overrides_loss(model: Any) -> bool:
    """Whether the model has its own ``compute_loss``."""
    return isinstance(model, keras.Model) and _overrides(model, "compute_loss")


def _check_methods(model: keras.Model) -> None:
    for name, instead in _NOT_RUN.items():
        if not _overrides(model, name):
            continue
        optimizers = [
            attribute
            for attribute, value in vars(model).items()
            if isinstance(value, keras.optimizers.Optimizer) and attribute != "optimizer"
        ]
        if len(optimizers) > 1:
            raise InvalidJob(
                f"{type(model).__name__} overrides {name}() and has several optimizers "
                f"({', '.join(sorted(optimizers))}); one optimizer trains all variables of a "
                "job by the gradients of one loss, so models that are trained by turns, such "
                "as a GAN, are not supported",
                code="PS108",
            )
        raise InvalidJob(
            f"{type(model).__name__} overrides {name}(), which workers do not call; {instead}",
            code="PS108",
        )


def _check_layers(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise InvalidJob(
                f"layer {layer.name!r} is made with stateful=True, so each batch goes on where the "
                "one before has ended; workers take batches in another order, and several at once. "
                "Leave it out, and give whole sequences as records",
                code="PS108",
            )
        if isinstance(layer, keras.layers.TFSMLayer) and layer.trainable_weights:
            # Its function reads TensorFlow's own variables, not the values of a step.
            raise InvalidJob(
                f"layer {layer.name!r} is a SavedModel, whose variables workers do not train; "
                "make it with trainable=False, or build the model in Keras and load its weights",
                code="PS108",
            )
    for variable in model.trainable_weights:
        if getattr(variable, "overwrite_with_gradient", False):
            raise InvalidJob(
                f"variable {variable.path!r} takes its gradient for its next value, as layers "
                "quantized to float8 have them; the optimizer on the shards would follow it as any "
                "other gradient. Train in float32 or mixed_bfloat16, and quantize what is exported",
                code="PS108",
            )


def _overrides(model: keras.Model, name: str) -> bool:
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def _compile_arguments(model: Any) -> Mapping[str, Any]:
    """Returns the arguments of ``compile``; empty if it was not called."""
    if not isinstance(model, keras.Model) or not model.compiled:
        return {}
    # The public get_compile_config() serializes functions of the user to bytecode.
    # model.optimizer: Keras wraps that of a mixed_float16 model in a LossScaleOptimizer.
    return {**model._compile_config.config, "optimizer": model.optimizer}


def _check_arguments(compiled: Mapping[str, Any]) -> None:
    if compiled.get("run_eagerly"):
        raise InvalidJob(
            "the model is compiled with run_eagerly=True, but workers compile the step; leave it "
            "out, and debug with plain fit()",
            code="PS108",
        )


def _given(value: Any) -> bool:
    return value is not None and not (isinstance(value, list | tuple | dict) and not value)


def _canonical(name: str, value: Any) -> Any:
    """Returns a value that is equal for arguments that mean the same to Keras."""
    if isinstance(value, dict):
        return {key: _canonical(name, element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(name, element) for element in value]
    if name == "optimizer":
        scale = initial_scale(value)
        value = inner(_optimizer(value))
    if name == "loss":
        # "mse", the function and the object without arguments are equal.
        built_in = loss_name(value)
        if built_in and (not isinstance(value, keras.losses.Loss) or _is_plain(value)):
            return built_in
    if hasattr(value, "get_config") and not isinstance(value, type):
        config = value.get_config()
        if name == "optimizer":
            config.pop("name", None)  # Keras numbers the optimizers of a process: adam, adam_1
            return type(value), config, scale
        return type(value), config
    return value


def _optimizer(optimizer: Any) -> Any:
    try:
        return keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    except ValueError:
        return optimizer


def _is_plain(loss: keras.losses.Loss) -> bool:
    """Whether a loss was made without arguments."""
    try:
        return bool(type(loss)().get_config() == loss.get_config())
    except (TypeError, NotImplementedError):
        return False


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float | list | tuple | dict):
        return repr(value)
    return getattr(value, "__name__", None) or type(value).__name__
