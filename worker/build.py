"""Makes the Keras objects that a job describes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.naming import reset_uids

from pserver.updates.allowlist import EXCLUDED, check_optimizer, weight_decay_exclusions
from psrpc.errors import InvalidJob
from worker.data import Batch, map_arrays
from worker.job import Job
from worker.loader import user_code
from worker.overrides import override_optimizer


def build_model(job: Job, example: Batch) -> Any:
    """The job's model with all its variables, the same initial values and names in each process
    and at each call.

    Args:
        job: says how to make it; its seed is set for Python, numpy and TensorFlow before.
        example: a few records; what creates its variables when it first sees data is shown them.

    Returns:
        A ``keras.Model`` or a ``tf.Module``.

    Raises:
        InvalidJob: the function makes something else.
        UserCodeFailed: it raised.
    """
    keras.utils.set_random_seed(job.seed % 2**32)
    # Keras numbers layers ("dense_1") over the life of a process. Without this a second model
    # would have other names than the first; no public function does it alone.
    reset_uids()
    with user_code("model()"):
        model = job.model()
    if isinstance(model, keras.Model):
        if not model.built:
            with user_code("the first call of the model"):
                model(map_arrays(tf.convert_to_tensor, example[0]), training=False)
    elif isinstance(model, tf.Module):
        if isinstance(job.loss, str | keras.losses.Loss):
            raise InvalidJob(
                f"loss is {job.loss!r}, but the model is a tf.Module; expected a function "
                "f(module, x, y)"
            )
        # A module that is already complete must not be run: a step might change its state.
        if not model.variables:
            with user_code("the first call of the loss"):
                job.loss(model, *map_arrays(tf.convert_to_tensor, example))
    else:
        raise InvalidJob(
            f"model() made a {type(model).__name__}; expected a keras.Model or a tf.Module"
        )
    return model


def serialized_optimizer(
    job: Job, arguments: Mapping[str, str], variables: list[Any]
) -> dict[str, Any]:
    """The job's optimizer as ``keras.optimizers.serialize`` writes it, in plain JSON types, with
    the overrides ``optimizer.*`` in ``arguments`` applied.

    Args:
        variables: the model's trainable variables, to ask which of them are not to decay.

    Raises:
        InvalidJob: Keras has no such optimizer, or the shards will not build it.
    """
    optimizer = job.optimizer
    if isinstance(optimizer, str):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError:
            raise InvalidJob(
                f"optimizer is {optimizer!r}; Keras has no optimizer of that name"
            ) from None
    elif not isinstance(optimizer, keras.optimizers.Optimizer):
        given = (job.total_updates(),) if _required_arguments(optimizer) else ()
        with user_code("optimizer()"):
            optimizer = optimizer(*given)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidJob(
            f"optimizer() made a {type(optimizer).__name__}; expected a Keras optimizer"
        )
    serialized = _plain(keras.optimizers.serialize(optimizer))
    excluded = weight_decay_exclusions(optimizer, [v for v in variables if hasattr(v, "path")])
    if excluded:
        serialized[EXCLUDED] = excluded
    serialized = override_optimizer(serialized, arguments)
    check_optimizer(serialized)
    return dict(serialized)


def _required_arguments(function: Any) -> int:
    """How many positional arguments without a default a callable takes."""
    parameters = inspect.signature(function).parameters.values()
    return sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _plain(value: Any) -> Any:
    """``value`` without numpy scalars and tuples, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value
