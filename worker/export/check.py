"""Checks that an export holds the rows of its tables, and finds out how to load it."""

from __future__ import annotations

import gc
import inspect
import json
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model.nested_structure_coder import decode_proto

from psrpc.core.errors import PsError
from worker.data.source import Array


def check_held(
    held: Iterable[tuple[keras.layers.Embedding, str]], tables: Mapping[str, Array]
) -> None:
    """Raises PsError if a layer holds other values than the table named with it."""
    for layer, name in held:
        if not _same(layer.embeddings.numpy(), tables[name]):
            raise PsError(
                f"layer {layer.name!r} does not hold the rows of table {name!r}; nothing was "
                "written"
            )


def check_written(path: Path, kind: str, tables: Mapping[str, Array]) -> None:
    """Reads the export and looks for an array with the values of each table. Holds one array at a
    time; extracts the weights of a ``.keras`` file to disk.

    Args:
        kind: as :func:`worker.export.export.save_name` returns it.

    Raises:
        PsError: a table has no such array.
    """
    missing = dict(tables)
    if missing:
        for array in _arrays(path, kind):
            missing = {name: rows for name, rows in missing.items() if not _same(array, rows)}
    if missing:
        raise PsError(
            f"{path.name} was to hold the rows of table {next(iter(missing))!r}, and has no array "
            "of these values; it was removed"
        )


def own_names(path: Path) -> list[str]:
    """Returns the sorted classes and functions that a ``.keras`` file names and Keras lacks; the
    code that loads it must pass them."""
    with zipfile.ZipFile(path) as archive:
        return sorted(_own_names(json.loads(archive.read("config.json"))))


def why_not_loaded(path: Path, module: ModuleType) -> str:
    """Returns in one line why Keras cannot construct a class of ``module`` from a ``.keras`` file;
    empty if nothing is wrong. Keras passes the whole config to the constructor, including name,
    dtype and trainable."""
    with zipfile.ZipFile(path) as archive:
        documents = list(_objects(json.loads(archive.read("config.json"))))
    for document in documents:
        made: Any = getattr(module, str(document["class_name"]), None)
        config = document.get("config")
        if not (_is_own(document) and callable(made) and isinstance(config, dict)):
            continue
        if "layers" in config:
            continue  # a functional model, made of its layers
        if not getattr(made, "from_config", _objects).__module__.startswith("keras."):
            continue  # it has its own way of construction
        try:
            inspect.signature(made.__init__).bind(None, **config)
        except TypeError as error:
            return f"{made.__name__}.__init__() {error}"
    return ""


def loading(path: Path, module: ModuleType, needed: Sequence[str]) -> tuple[dict[str, bool], str]:
    """Loads a ``.keras`` file as a user does, compiled if it says so, with the ``needed`` objects
    of ``module``. Takes the model's memory once more.

    Returns:
        The options that ``keras.models.load_model`` needs, and in one line why it fails without
        them. Both are empty if it does not fail; the options also if none helps.
    """
    gc.collect()  # frees the exported model, which is in cycles
    own = {name: getattr(module, name) for name in needed if hasattr(module, name)}
    reason = ""
    for options in _OPTIONS:
        try:
            with warnings.catch_warnings():
                # Keras warns that an export holds no state of the optimizer.
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                keras.models.load_model(path, custom_objects=own, **options)
        except Exception as error:  # the user's classes raise anything
            reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return options, reason
    return {}, reason


_OPTIONS: Sequence[dict[str, bool]] = ({}, {"compile": False}, {"safe_mode": False})
"""Options to try, in this order: the fewer a user must give, the better."""


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yields all descriptions of objects in a document, outer ones first."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _objects(part)


def how_served(path: Path) -> str:
    """Returns how to call the endpoint ``serve`` of a SavedModel: ``model.serve([a, b])`` with the
    names of its inputs, and their types as a comment; empty without such an endpoint."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    objects = saved.meta_graphs[0].object_graph_def
    found = {child.local_name: child.node_id for child in objects.nodes[0].children}
    if "serve" not in found:
        return ""
    functions = objects.nodes[found["serve"]].function.concrete_functions
    if not functions:
        return ""
    signature = objects.concrete_functions[functions[0]].canonicalized_input_signature
    positional, _ = decode_proto(signature)
    specs: dict[str, tf.TypeSpec] = {}
    given = ", ".join(_argument(spec, specs) for spec in positional)
    types = ", ".join(f"{name} {_tensor(spec)}" for name, spec in specs.items())
    return f"model.serve({given})  # {types}"


def _argument(nest: Any, specs: dict[str, tf.TypeSpec], name: str = "") -> str:
    """Formats an argument with a name for each tensor, which is added to ``specs``."""
    if isinstance(nest, Mapping):
        parts = (f"{key!r}: {_argument(nest[key], specs, str(key))}" for key in sorted(nest))
        return f"{{{', '.join(parts)}}}"
    if isinstance(nest, list):
        return f"[{', '.join(_argument(part, specs, _given(part)) for part in nest)}]"
    if isinstance(nest, tuple):
        return f"({', '.join(_argument(part, specs, _given(part)) for part in nest)},)"
    usable = name.isidentifier() and not iskeyword(name) and name not in specs
    name = name if usable else f"x{len(specs) or ''}"
    specs[name] = nest
    return name


def _given(spec: Any) -> str:
    """Returns the job's name of an input; empty if Keras made the name up."""
    name = getattr(spec, "name", None) or ""
    return "" if name.startswith(("args_", "keras_tensor", "inputs")) else name


def _tensor(spec: tf.TypeSpec) -> str:
    """Formats a spec like ``float32 [n, 4]``."""
    ragged = "ragged " if isinstance(spec, tf.RaggedTensorSpec) else ""
    if spec.shape.rank is None:
        return f"{ragged}{spec.dtype.name}"
    unknown = ["n", *["any"] * spec.shape.rank]
    axes = [
        other if axis is None else axis for axis, other in zip(spec.shape, unknown, strict=False)
    ]
    return f"{ragged}{spec.dtype.name} [{', '.join(map(str, axes))}]"


def _own_names(config: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(config, list):
        found.update(*map(_own_names, config))
    if isinstance(config, dict):
        found.update(*map(_own_names, config.values()))
        name = config.get("class_name")
        if name == "function" and isinstance(config.get("config"), str):
            # Keras stores only the name of its own functions.
            found.add(config["config"])
        elif _is_own(config):
            found.add(str(name))
    return found


def _is_own(document: dict[str, Any]) -> bool:
    """Whether the object's class belongs neither to Keras nor to Python."""
    module = document.get("module")
    return isinstance(module, str) and module.split(".")[0] not in ("keras", "builtins")


def _arrays(path: Path, kind: str) -> Iterator[Array]:
    """Yields every array of the file."""
    if kind == "saved_model":
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        for name, dtype in reader.get_variable_to_dtype_map().items():
            if dtype.is_floating:
                yield reader.get_tensor(name)
    elif kind == "keras":
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(dir=path.parent) as to:
            yield from _hdf5_arrays(archive.extract("model.weights.h5", to))
    else:
        yield from _hdf5_arrays(path)


def _hdf5_arrays(path: str | Path) -> Iterator[Array]:
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visit(names.append)
        for name in names:
            if isinstance(file[name], h5py.Dataset):
                yield file[name][()]


def _same(array: Array, rows: Array) -> bool:
    """Whether both have the same values at the array's precision."""
    if array.shape != rows.shape:
        return False
    return bool(np.array_equal(array, rows.astype(array.dtype), equal_nan=True))
