"""Builds the Keras objects of a job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.utils.naming import reset_uids

from pserver.updates.allowlist import EXCLUDED, check_optimizer, weight_decay_exclusions
from pserver.updates.keras_objects import rebuild
from psrpc.core.errors import InvalidJob
from worker.data.ragged import as_tensor
from worker.data.source import Batch, map_arrays
from worker.embedding.lookups import NoRows, look_up
from worker.embedding.table_options import plain_json
from worker.job.checks import required_arguments
from worker.job.job import Job
from worker.job.loader import user_code
from worker.job.output_names import weights_as_outputs
from worker.job.overrides import override_optimizer
from worker.model import keras_names
from worker.model.inputs import first_call
from worker.model.loss_scale import SCALE, initial_scale, inner
from worker.model.variables import check_vocabularies


def build_model(job: Job, example: Batch) -> Any:
    """Builds the job's model with all its variables. Initial values and names are the same in each
    process and at each call, because this first seeds Python, numpy and TensorFlow.

    Args:
        example: a few records, for models that create variables when they first see data.

    Returns:
        A ``keras.Model`` or a ``tf.Module``.

    Raises:
        InvalidJob: the function makes something else, or a layer has no vocabulary.
        UserCodeFailed: it raised.
    """
    keras.utils.set_random_seed(job.seed % 2**32)
    # Keras numbers layers ("dense_1") per process; without a reset a second model would get other
    # names than the first. No public function does only this.
    reset_uids()
    with user_code("model()"), look_up(NoRows()):
        model = job.model()
    if isinstance(model, keras.Model):
        check_vocabularies(model)
        if not model.built:
            # Creates the variables but changes none: a layer may count its calls.
            with first_call(example[0]), keras.StatelessScope(), look_up(NoRows()):
                model(map_arrays(as_tensor, example[0]), training=False)
    elif isinstance(model, tf.Module):
        if not callable(job.loss) or isinstance(job.loss, keras.losses.Loss | type):
            raise InvalidJob(
                f"loss is {job.loss!r}, but the model is a tf.Module; expected a function "
                "f(module, x, y)"
            )
        # Do not run a module that has its variables: that might change its state.
        if not model.variables:
            with user_code("the first call of the loss"), look_up(NoRows()):
                job.loss(model, *map_arrays(as_tensor, example))
    else:
        made = "made None (did you forget `return`?)"
        if model is not None:
            made = f"made a {type(model).__name__}"
        raise InvalidJob(f"model() {made}; expected a keras.Model or a tf.Module")
    return model


def build_loss(job: Job, model: keras.Model) -> Callable[..., Any]:
    """Returns the loss of a Keras model: ``f(batch, y_pred, training)``, a scalar, to call in a
    ``StatelessScope`` that collects losses.

    It is the mean over the batch of the values of the job's loss, plus the losses that layers add;
    with sample weights the sum of weighted values divided by the number of examples, as in
    ``keras.Model.fit``. The name ``crossentropy`` means the kind that fits the shapes. If the model
    is compiled, by its own code or by :func:`worker.model.compiled.complete`, Keras computes it.

    Raises:
        InvalidJob: Keras has no loss of this name.
    """
    if model.compiled:
        return _computed_by(model)
    chosen_by_shapes = str(job.loss).lower() in ("crossentropy", "ce")
    fixed = None if chosen_by_shapes else _loss(job.loss)

    def mean_loss(batch: Batch, y_pred: Any, training: bool) -> Any:  # noqa: ARG001
        loss = fixed
        if loss is None:
            kind = kind_of_labels(str(job.loss), batch[1], y_pred)
            loss = _loss(f"{kind}_crossentropy")
        sample_weight = batch[2] if len(batch) > 2 else None
        # A loss with reduction=None gives one value per example.
        total = keras.ops.mean(loss(batch[1], y_pred, sample_weight=sample_weight))
        for own in model.losses:
            # Regularizers and add_loss may give one value per record; Keras sums them in the
            # loss's dtype.
            total += tf.cast(keras.ops.sum(own), total.dtype)
        return total

    return mean_loss


def _computed_by(model: keras.Model) -> Callable[..., Any]:
    # Overrides written for Keras before 3.3 have no such argument.
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    own = type(model).compute_loss is not keras.Model.compute_loss

    def compute_loss(batch: Batch, y_pred: Any, training: bool) -> Any:
        x, y, sample_weight = (*batch, None)[:3]
        if isinstance(y, tuple) and not y:  # NO_LABELS
            y = None
        if not own:
            sample_weight = weights_as_outputs(model, y_pred, sample_weight)
        arguments = {"training": training} if takes_training else {}
        loss = model.compute_loss(x, y, y_pred, sample_weight, **arguments)
        return keras.ops.mean(loss)

    return compute_loss


def _loss(loss: Any) -> Any:
    if isinstance(loss, str):
        loss = keras_names.get("loss", loss)
    if isinstance(loss, keras.losses.Loss):
        return loss
    # The wrapper reshapes labels [n] for an output [n, 1], as fit does for functions and names. Its
    # name becomes a TensorFlow scope, which must not begin with an underscore.
    return LossFunctionWrapper(loss, name="loss")


def loss_trackers(model: Any) -> list[Any]:
    """Returns the means of the losses of several outputs, which Keras reports as ``OUTPUT_loss``;
    empty for a single output."""
    # The public Model.metrics does not tell them from other metrics.
    compiled = getattr(model, "_compile_loss", None)
    return [] if compiled is None else list(compiled.metrics)


def layer_metrics(model: Any) -> list[Any]:
    """Returns the metrics that layers keep as attributes and update themselves, in model order.
    Keras reports them beside those of ``compile``."""
    if not isinstance(model, keras.Model):
        return []
    of_compile = [*loss_trackers(model), *(getattr(model, name, None) for name in _OF_COMPILE)]
    others = {id(metric) for metric in of_compile}
    return [metric for metric in model.metrics if id(metric) not in others]


_OF_COMPILE = ("_loss_tracker", "_compile_metrics")
"""Attributes of a model that hold metrics of ``compile``."""

BY_OUTPUT = "compile_metrics"
"""Name of Keras's collection of the metrics of several outputs. Load-bearing: Keras chose it."""


def serialized_optimizer(
    job: Job, arguments: Mapping[str, str], variables: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Returns the job's optimizer as ``keras.optimizers.serialize`` writes it, in plain JSON types,
    with the overrides ``optimizer.*`` in ``arguments`` applied.

    Args:
        variables: the model's trainable variables by the plan's names, to exclude some of them from
            weight decay.

    Raises:
        InvalidJob: Keras has no such optimizer, or shards cannot build it.
    """
    optimizer = job.optimizer
    if isinstance(optimizer, str):
        optimizer = keras_names.get("optimizer", optimizer)
    elif callable(optimizer) and not isinstance(optimizer, keras.optimizers.Optimizer):
        keras_names.check_class("optimizer", optimizer)
        given = (job.optimizer_updates(),) if required_arguments(optimizer) else ()
        with user_code("optimizer()"):
            optimizer = optimizer(*given)
        if initial_scale(optimizer) != SCALE:
            raise InvalidJob(
                "optimizer() made a LossScaleOptimizer with initial_scale="
                f"{initial_scale(optimizer)}; give the optimizer itself in place of a function",
                code="PS108",
            )
    optimizer = inner(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidJob(
            f"optimizer() made a {type(optimizer).__name__}; expected a Keras optimizer"
        )
    serialized = plain_json(keras.optimizers.serialize(optimizer))
    excluded = weight_decay_exclusions(
        optimizer, [(n, v) for n, v in variables if hasattr(v, "path")]
    )
    if excluded:
        serialized[EXCLUDED] = excluded
    serialized = override_optimizer(serialized, arguments)
    check_optimizer(serialized)
    if arguments:
        # Lets Keras check the ranges of the overrides; it has checked the job file's arguments.
        try:
            rebuild("optimizer", serialized)
        except InvalidJob as error:
            shown = " ".join(f"--set optimizer.{key}={text}" for key, text in arguments.items())
            why = str(error.__cause__ or error)  # Keras's own words
            raise InvalidJob(f"{shown}: {' '.join(why.split())}") from None
    return serialized


def kind_of_labels(name: str, y_true: Any, y_pred: Any) -> str:
    """Returns the kind of labels by shapes alone, with the rule of ``keras.Model.compile``."""
    if not hasattr(y_true, "shape") or not hasattr(y_pred, "shape"):
        raise InvalidJob(f"{name!r} needs a model of one output; give a function instead")
    if y_pred.shape[-1] == 1:
        return "binary"
    if len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1:
        return "sparse_categorical"
    return "categorical"
