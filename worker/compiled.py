"""The job as its Keras model completes it: the arguments of ``compile`` and overridden methods.

Keras trains with what ``compile`` was given, through ``train_step``. A worker has a training step
of its own, so each of these is either taken over or refused by name before training begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from psrpc.errors import InvalidJob
from worker.build import build_loss, build_model
from worker.data import Batch, map_arrays
from worker.job import Job
from worker.labels import loss_name
from worker.loader import user_code
from worker.lookups import NoRows, look_up
from worker.ragged import as_tensor

_NOT_RUN = {
    "train_step": "write the forward pass in call(), a loss of its own in compute_loss()",
    "test_step": "evaluations compute the job's loss and metrics; give those",
    "make_train_function": "workers compile the step themselves",
    "make_test_function": "workers compile the evaluation themselves",
    "compute_metrics": "give metrics to the job, as metrics=[...]",
}
"""Methods of ``keras.Model`` that workers never call, and what to use instead."""


def complete(job: Job, example: Batch) -> tuple[Job, Any]:
    """Builds the model of a job, and takes from its ``compile`` what the job leaves out.

    Returns:
        The job with its loss, optimizer and metrics, and the model: compiled with them where Keras
        is to compute the loss (several outputs, a ``compute_loss`` of the model's own), and
        otherwise not.

    Raises:
        InvalidJob: the model cannot be built; it overrides a method that workers do not call, or
            is compiled with an argument that they do not follow; the job gives another loss,
            optimizer or list of metrics than ``compile``; or neither gives a loss or an optimizer.
    """
    model = build_model(job, example)
    compiled = _compile_arguments(model)
    job = completed(job, model)
    if isinstance(model, keras.Model) and (model.compiled or _needs_compile(job, model)):
        if any(compiled.get(name) is not getattr(job, name) for name in _MEASURES):
            with user_code("compile()"):
                model.compile(
                    compiled.get("optimizer"), **{name: getattr(job, name) for name in _MEASURES}
                )
        # Keras makes what counts the losses and metrics of outputs when it first sees some.
        with user_code("the loss"), look_up(NoRows()):
            records = map_arrays(as_tensor, example)
            outputs = model(records[0], training=False)
            build_loss(job, model)(records, outputs, training=False)
    return job, model


_MEASURES = ("loss", "loss_weights", "metrics")


def _needs_compile(job: Job, model: keras.Model) -> bool:
    """Whether Keras computes the loss: it has a rule of its own for several outputs."""
    if overrides_loss(model) or isinstance(job.metrics, dict) or job.loss_weights is not None:
        return True
    if isinstance(job.loss, str | keras.losses.Loss):
        return len(getattr(model, "outputs", [None])) > 1
    return isinstance(job.loss, dict | list | tuple)


def completed(job: Job, model: Any) -> Job:
    """The job with the loss, optimizer and metrics of ``model.compile`` where it gives none. Raises
    as :func:`complete` does."""
    compiled = _compile_arguments(model)
    if isinstance(model, keras.Model):
        _check_methods(model)
        _check_arguments(compiled)
    chosen: dict[str, Any] = {}
    for name in ("optimizer", "loss", "loss_weights", "metrics"):
        own, other = getattr(job, name), compiled.get(name)
        if _given(own) and _given(other) and not _same(name, own, other):
            raise InvalidJob(
                f"{name} is {_shown(own)} in the job and {_shown(other)} in compile() of the "
                f"model; give it in one of the two places{_DEFAULTS.get(name, '')}",
                code="PS108",
            )
        if not _given(own) and _given(other):
            chosen[name] = other
    completed = replace(job, **chosen) if chosen else job
    if completed.optimizer is None:
        raise InvalidJob(f"the job has no optimizer; {_WHERE.format('optimizer')}")
    if completed.loss is None and not overrides_loss(model):
        raise InvalidJob(f"the job has no loss; {_WHERE.format('loss')}")
    return completed


_WHERE = "give Job({0}=...), or compile the model with compile({0}=...)"
_DEFAULTS = {
    "optimizer": " (compile() takes rmsprop where it is given none; optimizer=None is none)"
}


def overrides_loss(model: Any) -> bool:
    """Whether the model computes its own loss, in ``compute_loss``."""
    return isinstance(model, keras.Model) and _overrides(model, "compute_loss")


def _check_methods(model: keras.Model) -> None:
    for name, instead in _NOT_RUN.items():
        if _overrides(model, name):
            raise InvalidJob(
                f"{type(model).__name__} overrides {name}(), which workers do not call; {instead}",
                code="PS108",
            )


def _overrides(model: keras.Model, name: str) -> bool:
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def _compile_arguments(model: Any) -> Mapping[str, Any]:
    """What ``compile`` was given; empty where it was not called."""
    if not isinstance(model, keras.Model) or not model.compiled:
        return {}
    # get_compile_config() is public, but serializes functions of the user's into bytecode.
    arguments: dict[str, Any] = dict(model._compile_config.config)
    # Keras wraps the optimizer of a model in mixed_float16 to scale the loss.
    arguments["optimizer"] = model.optimizer
    return arguments


def _check_arguments(compiled: Mapping[str, Any]) -> None:
    if compiled.get("run_eagerly"):
        raise InvalidJob(
            "the model is compiled with run_eagerly=True, but workers compile the step; leave it "
            "out, and debug with plain fit()",
            code="PS108",
        )
    if compiled.get("weighted_metrics"):
        raise InvalidJob(
            "the model is compiled with weighted_metrics, which workers do not compute; give "
            "metrics, which weigh every record alike",
            code="PS108",
        )


def _given(value: Any) -> bool:
    return value is not None and not (isinstance(value, list | tuple | dict) and not value)


def _same(name: str, own: Any, other: Any) -> bool:
    return own is other or _canonical(name, own) == _canonical(name, other)


def _canonical(name: str, value: Any) -> Any:
    """A value that is equal for what Keras takes to be the same thing."""
    if isinstance(value, dict):
        return {key: _canonical(name, element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(name, element) for element in value]
    if name == "optimizer":
        value = _optimizer(value)
    if name == "loss":
        # "mse", the function and the object without arguments are one.
        built_in = loss_name(value)
        plain = not isinstance(value, keras.losses.Loss) or _is_plain(value)
        if built_in and plain:
            return built_in
    if hasattr(value, "get_config") and not isinstance(value, type):
        config = value.get_config()
        if name == "optimizer":
            # Keras numbers the optimizers of a process: adam, adam_1.
            config.pop("name", None)
        return type(value), config
    return value


def _optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, str):
        try:
            return keras.optimizers.get(optimizer)
        except ValueError:
            return optimizer
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
