"""Hands a compiled Keras model from the process that calls ``fit`` to those of a job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
from keras.src.models.functional import Functional

from pserver.updates.allowlist import weight_decay_exclusions
from psrpc.core.errors import InvalidJob
from worker.data.ragged import Ragged, as_tensor
from worker.data.source import map_arrays
from worker.embedding.lookups import GivenRows, NoRows, look_up
from worker.embedding.trained import rows_left_out
from worker.handover.construction import Maker, has_no_config, with_state
from worker.handover.custom import check_functions, named_apart, user_objects
from worker.model.inputs import first_call
from worker.model.loss_scale import inner
from worker.model.metrics import made_anew
from worker.stored.objects import load_object, save_object

MODEL = "model.keras"
"""Architecture, weights and vocabularies, as Keras writes them."""

OBJECTS = "objects.pkl"
PATHS = "paths.json"

MEASURES = ("loss", "loss_weights", "metrics", "weighted_metrics")
"""Arguments of ``compile`` that ``evaluate`` needs."""

_COMPILED = (*MEASURES, "optimizer")
"""Arguments of ``compile`` that a job uses. Others, such as ``steps_per_execution`` and
``jit_compile``, do not change the result."""


@dataclass(frozen=True)
class _Handover:
    """State that ``model.keras`` does not hold.

    Attributes:
        classes: the caller's classes and functions by the names in that file.
        kind: the name of the model's own class.
        compiled: arguments of ``compile``.
        policy: the caller's dtype policy, floatx, epsilon and image data format.
        trainable: whether each layer is trainable, in the order of the model.
        weights: the path of each weight, and whether it is trainable. The paths must be equal in
            both processes, since checkpoints have these names; but Keras forms them when it builds
            the layers, which may give others in the other process.
        undecayed: the places of the trainable variables that the optimizer does not decay.
        sample: two records, to build a model whose own code makes its layers; None for others.
        held: attributes of layers that Keras cannot write.
    """

    classes: Mapping[str, Any]
    kind: str
    compiled: Mapping[str, Any]
    policy: tuple[Any, str, float, str]
    trainable: list[bool]
    weights: list[tuple[str, bool]]
    undecayed: list[int]
    sample: Any
    held: list[Any]


def hand_over(
    folder: Path, model: keras.Model, sample: Any = None, arguments: Collection[str] = _COMPILED
) -> None:
    """Writes a model, so that :func:`take_over` in another process makes one that trains alike.
    Leaves the rows of embedding tables out.

    Args:
        folder: a folder that exists, without another model.
        model: built here if it is not yet, as the first batch of ``fit`` would.
        sample: a few records of the input: an array, or a dict, list or tuple of them. A model
            that is not built yet needs it, and one that is a class of its own may.
        arguments: the arguments of ``compile`` to hand over; without any, :func:`take_over` does
            not compile the model.

    Raises:
        InvalidJob: Keras cannot write a layer, a class or a metric, or the model is not built and
            there is no sample; the message names it and the fix.
    """
    if sample is not None:
        sample = map_arrays(lambda array: array[:2], sample)
    if not model.built:
        if sample is None:
            raise InvalidJob(
                f"model {model.name!r} has no weights yet; call it on a batch, or give it a "
                "keras.Input"
            )
        _build(model, sample)
    given = dict(model._compile_config.config) if arguments else {}
    held: list[Any] = []
    classes, functions = user_objects(model, given)
    check_functions(model, functions)
    with named_apart(classes, functions) as found:
        _save(folder / MODEL, model, held)
        compiled = {name: _packed(given.get(name), found) for name in MEASURES if name in arguments}
        with_optimizer = "optimizer" in arguments and model.optimizer is not None
        if with_optimizer:
            # Its present state: the learning rate may have been assigned since compile().
            compiled["optimizer"] = _Config(keras.saving.serialize_keras_object(model.optimizer))
    handover = _Handover(
        classes=found,
        kind=keras.saving.get_registered_name(type(model)),
        compiled=compiled,
        policy=(
            keras.saving.serialize_keras_object(keras.config.dtype_policy()),
            keras.config.floatx(),
            keras.config.epsilon(),
            keras.config.image_data_format(),
        ),
        trainable=[layer.trainable for layer in model._flatten_layers()],
        weights=[(variable.path, variable.trainable) for variable in model.weights],
        undecayed=_undecayed(model) if with_optimizer else [],
        sample=None if _is_graph(model) else sample,
        held=held,
    )
    save_object(folder / OBJECTS, handover)
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (keeps links)
    (folder / PATHS).write_text(json.dumps(list(dict.fromkeys(paths))))


def take_over(folder: Path) -> keras.Model:
    """Returns the model of :func:`hand_over`. Its modules come from the folders that the
    caller's program imports from, and the dtype policy of this process becomes the caller's.

    Raises:
        InvalidJob: the folder has no model, or one of another user.
    """
    try:
        paths = json.loads((folder / PATHS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidJob(f"{str(folder)!r} has no model of a fit: {error}") from None
    # These come first, as in the caller: the folder of the job file may have modules of the same
    # names.
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    handover = load_object(folder / OBJECTS)
    if not isinstance(handover, _Handover):
        raise InvalidJob(f"{str(folder)!r} has no model of a fit, but a {type(handover).__name__}")
    policy, floatx, epsilon, image_format = handover.policy
    keras.config.set_floatx(floatx)
    keras.config.set_epsilon(epsilon)
    keras.config.set_image_data_format(image_format)
    classes = dict(handover.classes)
    keras.config.set_dtype_policy(keras.saving.deserialize_keras_object(policy, classes))

    def build(model: keras.Model) -> None:
        # The shapes that Keras writes do not suffice to build all models and layers.
        built = all(layer.built for layer in model._flatten_layers())
        if not built and handover.sample is not None:
            _build(model, handover.sample)

    makers = {
        name: Maker(kind, handover.held, build if name == handover.kind else None)
        if isinstance(kind, type) and (name == handover.kind or has_no_config(kind))
        else kind
        for name, kind in classes.items()
    }
    model = keras.saving.load_model(folder / MODEL, makers, compile=False, safe_mode=False)
    layers = model._flatten_layers()
    # Leave out the layers with rows that an export has given to the model.
    rows = [layer for layer in layers if isinstance(layer, GivenRows)]
    given = {id(variable) for layer in rows for variable in layer.weights}
    layers = [layer for layer in layers if layer not in rows]
    weights = [variable for variable in model.weights if id(variable) not in given]
    for name, there, here in (
        ("layers", len(handover.trainable), len(layers)),
        ("weights", len(handover.weights), len(weights)),
    ):
        if there != here:
            raise InvalidJob(
                f"{handover.kind} has {there} {name} in the program that calls fit, and {here} "
                "where it is made again; make them all in its __init__, from its arguments",
                code="PS108",
            )
    for layer, trainable in zip(layers, handover.trainable, strict=True):
        # Layers come before their parts, which an assignment changes too.
        if layer.trainable != trainable:
            layer.trainable = trainable
    for variable, (path, trainable) in zip(weights, handover.weights, strict=True):
        variable._path = path
        if variable.trainable != trainable:
            variable.trainable = trainable
    compiled = {name: _unpacked(value, classes) for name, value in handover.compiled.items()}
    optimizer = compiled.pop("optimizer", None)
    if handover.undecayed:
        trained = [variable for variable in weights if variable.trainable]
        variables = [trained[place] for place in handover.undecayed]
        inner(optimizer).exclude_from_weight_decay(var_list=variables)
    if handover.compiled:
        model.compile(optimizer, **compiled)
    return model


@dataclass(frozen=True)
class _Config:
    """A Keras object as ``keras.saving.serialize_keras_object`` gives it."""

    serialized: Any


@dataclass(frozen=True)
class _State:
    """An object as its class and attributes, for losses: those of users need not have a config."""

    kind: Any
    attributes: Mapping[str, Any]


def _packed(value: Any, classes: Mapping[str, Any]) -> Any:
    """Returns the form of an argument for the file of objects. Called within :func:`named_apart`,
    which gave ``classes``."""
    if isinstance(value, Mapping):
        return {key: _packed(each, classes) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(each, classes) for each in value]
    if isinstance(value, keras.losses.Loss):
        return _State(type(value), dict(vars(value)))
    if isinstance(value, keras.Metric):
        what = f"{type(value).__name__} {value.name!r}"
        with _writing(what), keras.saving.custom_object_scope(classes):
            try:
                made_anew(value)
            except InvalidJob as error:
                raise ValueError(str(error).partition(";")[0]) from error
            return _Config(keras.saving.serialize_keras_object(value))
    return value


def _unpacked(packed: Any, classes: Mapping[str, Any]) -> Any:
    if isinstance(packed, dict):
        return {key: _unpacked(each, classes) for key, each in packed.items()}
    if isinstance(packed, list):
        return [_unpacked(each, classes) for each in packed]
    if isinstance(packed, _Config):
        return keras.saving.deserialize_keras_object(packed.serialized, classes, safe_mode=False)
    if isinstance(packed, _State):
        made = packed.kind.__new__(packed.kind)
        vars(made).update(packed.attributes)
        return made
    return packed


def _save(path: Path, model: keras.Model, held: list[Any]) -> None:
    """Writes the model as if it were not compiled."""
    # Not assigned by name: Keras tracks attributes.
    attributes, compiled = vars(model), model.compiled
    optimizer = attributes.pop("optimizer", None)
    attributes["compiled"] = False
    try:
        layers = model._flatten_layers()
        with rows_left_out(), with_state(layers, held), _writing(f"model {model.name!r}"):
            keras.saving.save_model(model, path, overwrite=True)
    finally:
        attributes.update(compiled=compiled, optimizer=optimizer)


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Turns the error of Keras, if it cannot write the object ``what``, into one that has a fix."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise InvalidJob(
            f"{what} cannot be handed over, since Keras cannot write it: {text}; its classes need "
            "a get_config() with all arguments of their constructors",
            code="PS108",
        ) from error


def _undecayed(model: keras.Model) -> list[int]:
    names = [(str(place), each) for place, each in enumerate(model.trainable_variables)]
    return [int(name) for name in weight_decay_exclusions(inner(model.optimizer), names)]


def _build(model: keras.Model, sample: Any) -> None:
    # On symbols, as fit does: a call would run preprocessing layers whose state is not loaded yet.
    def symbol(array: Any) -> Any:
        if isinstance(array, Ragged):
            return as_tensor(array)
        dtype = "string" if array.dtype.kind in "SUO" else str(array.dtype)
        return keras.KerasTensor((None, *array.shape[1:]), dtype)

    with first_call(sample), look_up(NoRows()):
        model(map_arrays(symbol, sample), training=False)


def _is_graph(model: keras.Model) -> bool:
    """Whether Keras can make the layers of a model without code of the model's class."""
    return isinstance(model, Functional | keras.Sequential)
