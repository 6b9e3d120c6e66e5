"""Spreads a model over the devices of a worker, and its gradients with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.text import first_names
from worker.job.job import Devices
from worker.runtime.devices import HOST, Device

MORE_DEVICES = (
    "give the worker more (--gpu 0,1, or --devices cpu:2 without GPUs), or say soft_placement=True"
)

_OF_GRADIENTS = "gradient_tape/"
"""Name scope of the operations of a ``tf.GradientTape`` in a graph, before the name of the forward
operation that they differentiate."""

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"} | {
    f"{stateless}{kind}" for kind in ("Case", "If", "While") for stateless in ("", "Stateless")
}
"""Operations that call functions, whose operations are not among those of the graph."""

_JIT = "_XlaMustCompile"
"""Attribute that ``tf.function(jit_compile=True)`` sets."""


def check_enough(devices: Devices | None, device: Device) -> None:
    """Refuses a worker with fewer devices than its job names. Raises InvalidArgument."""
    wanted = max(devices.values(), default=0) if isinstance(devices, Mapping) else 0
    if wanted >= len(device.names):
        raise InvalidArgument(
            f"the job puts layers on device {wanted}, and this worker has "
            f"{', '.join(device.names)}; {MORE_DEVICES}",
            code="PS506",
        )


def place_layers(model: keras.Model, devices: Devices, names: Sequence[str]) -> None:
    """Makes the layers of a model compute on the devices that the job names for them. Changes this
    one model object, and no values.

    Args:
        names: the worker's devices; an index beyond the last means the first.

    Raises:
        InvalidJob: a pattern fits no layer, or there is no layer to cut.
    """
    for layer, index in placed_layers(model, devices):
        if index is None:
            layer.call = _in_columns(layer, names)
        else:
            layer.call = _on(layer.call, names[index if index < len(names) else 0])


def placed_layers(model: Any, devices: Devices) -> list[tuple[keras.layers.Layer, int | None]]:
    """Returns the layers that ``devices`` places, each with the index of its device, or None if its
    units are divided over all devices.

    Raises:
        InvalidJob: the model is no Keras model, a pattern fits no layer, or there is none to cut.
    """
    if not isinstance(model, keras.Model):
        raise InvalidJob(
            f"devices is for the layers of a Keras model, and model() makes a "
            f"{type(model).__name__}; use tf.device in the module",
            code="PS105",
        )
    layers = dict(_by_path(model))
    if devices == "columns":
        cut = [(layer, None) for layer in layers.values() if _can_be_cut(layer)]
        if not cut:
            raise InvalidJob(
                "devices is 'columns', and the model has no keras.layers.Dense to cut; name its "
                "layers, as in {'block1/*': 0, 'block2/*': 1}",
                code="PS105",
            )
        return list(cut)
    found: dict[int, tuple[keras.layers.Layer, int | None]] = {}
    for pattern, index in devices.items():
        fitting = [layer for path, layer in layers.items() if fnmatchcase(path, pattern)]
        if not fitting:
            raise InvalidJob(
                f"devices has {pattern!r}, which fits no layer; they are {first_names(layers)}",
                code="PS105",
            )
        for layer in fitting:
            found.setdefault(id(layer), (layer, index))
    return list(found.values())


def _by_path(layer: Any, above: str = "") -> Iterator[tuple[str, keras.layers.Layer]]:
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        if not isinstance(inner, keras.layers.InputLayer):
            path = above + inner.name
            yield path, inner
            yield from _by_path(inner, f"{path}/")


def _can_be_cut(layer: keras.layers.Layer) -> bool:
    plain = type(layer) is keras.layers.Dense and layer.quantization_mode is None
    return plain and not layer.lora_enabled and layer.units > 1


def _on(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def placed(*args: Any, **options: Any) -> Any:
        with tf.device(name):
            return call(*args, **options)

    return placed


def _in_columns(layer: keras.layers.Dense, names: Sequence[str]) -> Callable[..., Any]:
    """Returns ``call`` of a dense layer whose units are computed on all devices, a share on each.
    Each device gets only its share of the weights."""
    shares = [len(part) for part in _divided(layer.units, len(names))]

    @functools.wraps(layer.call)
    def call(inputs: Any, training: bool | None = None) -> Any:  # noqa: ARG001  # as Keras calls it
        with tf.device(HOST):
            kernels = tf.split(layer.kernel, shares, axis=1)
            biases = tf.split(layer.bias, shares) if layer.use_bias else [None] * len(shares)
        parts = []
        for name, kernel, bias in zip(names, kernels, biases, strict=True):
            with tf.device(name):
                part = keras.ops.matmul(inputs, kernel)
                parts.append(part if bias is None else keras.ops.add(part, bias))
        outputs = keras.ops.concatenate(parts, axis=-1)
        return outputs if layer.activation is None else layer.activation(outputs)

    return call


def _divided(units: int, count: int) -> list[range]:
    ends = [units * index // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


@contextmanager
def where_the_forward_pass_ran() -> Iterator[None]:
    """Places each gradient operation that TensorFlow traces within the block on the device of the
    forward operation that it differentiates. ``tf.GradientTape`` itself chooses no device, so all
    of them would run on the first one."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or len({operation.device for operation in graph.get_operations()}) < 2:
        yield
        return
    with graph.device(_device_of_gradient):
        yield


def _device_of_gradient(operation: tf.Operation) -> str:
    if operation.device:
        return str(operation.device)
    _, _, forward = operation.name.partition(_OF_GRADIENTS)
    while forward:
        try:
            return str(operation.graph.get_operation_by_name(forward).device)
        except KeyError:
            forward = forward.rpartition("/")[0]
    # Its name has only a scope of the forward pass. Choose the device of the results that it reads.
    own: list[str] = []
    read: list[str] = []
    for tensor in operation.inputs:
        (own if _OF_GRADIENTS in tensor.op.name else read).append(str(tensor.device))
    return next(reversed(read or list(filter(None, own))), "")


def check_placed(graph: tf.Graph, device: Device, *, soft: bool) -> None:
    """Checks the devices of a step's graph against those of this worker, unless placement is
    ``soft``.

    Raises:
        InvalidJob: XLA compiles a function that says ``tf.device`` for another device.
        InvalidArgument: the model asks for a device that the worker lacks (TensorFlow would
            silently use another), or leaves a device of the worker idle.
    """
    if soft:
        return
    asked = _asked(graph)
    for one in asked:
        compiled_on = _canonical(one.xla or device.name)
        if one.xla is not None and _canonical(one.device) != compiled_on:
            raise InvalidJob(
                f"the model computes {one.operation!r} on {_canonical(one.device)} within a "
                f"function that XLA compiles for {compiled_on} alone, where all of it would run; "
                "leave jit_compile=True out of that tf.function, or tf.device",
                code="PS108",
            )
    there = {_canonical(each.name) for each in tf.config.list_logical_devices()}
    used = {_canonical(one.device): one.operation for one in reversed(asked)}
    for name, operation in used.items():
        if name not in there:
            raise InvalidArgument(
                f"the model computes {operation!r} on {name}, and this worker has "
                f"{first_names(there)}; {MORE_DEVICES}",
                code="PS506",
            )
    for name in device.others:
        if _canonical(name) not in used:
            raise InvalidArgument(
                f"this worker has {', '.join(device.names)}, and the model leaves {name} idle; "
                "spread it by Job(devices=...), or start a worker for each device",
                code="PS506",
            )


def is_spread(graph: tf.Graph, device: Device) -> bool:
    """Whether the operations of ``graph`` ask for a device of this worker besides its first."""
    used = {_canonical(one.device) for one in _asked(graph)}
    return not used.isdisjoint(map(_canonical, device.others))


class _Asked(NamedTuple):
    """An operation that asks for a device. ``xla`` is the device of the call if XLA compiles the
    function that it is in, empty for the first one; None outside of such functions."""

    operation: str
    device: str
    xla: str | None


def _asked(graph: tf.Graph) -> list[_Asked]:
    """Returns the operations of ``graph`` and of the functions that it calls which ask for a
    device: one for each device of a function."""
    operations = graph.get_operations()
    found = {one.device: _Asked(one.name, one.device, None) for one in reversed(operations)}
    asked = list(found.values())
    if any(one.type in _CALLS for one in operations):
        definition = graph.as_graph_def()
        functions = {one.signature.name: one for one in definition.library.function}
        calls: list[tuple[str, Any, str, str | None]] = [
            (node.name, node, node.device, None) for node in definition.node
        ]
        seen = set()
        while calls:
            path, call, device, outer = calls.pop()
            for function in (functions[name] for name in _called(call) if name in functions):
                xla = outer
                if xla is None and any(each.attr[_JIT].b for each in (call, function)):
                    xla = device
                if (key := (function.signature.name, device, xla)) in seen:
                    continue
                seen.add(key)
                inner = {node.device: node.name for node in reversed(function.node_def)}
                asked += [_Asked(f"{path}/{name}", where, xla) for where, name in inner.items()]
                calls += [
                    (f"{path}/{node.name}", node, node.device or device, xla)
                    for node in function.node_def
                ]
    # A function of Python has the host of the process, and no device.
    return [one for one in asked if tf.DeviceSpec.from_string(one.device).device_type]


def _called(node: Any) -> Iterator[str]:
    """Returns the names of the functions that the node of a graph calls."""
    for value in node.attr.values():
        functions = [value.func] if value.HasField("func") else value.list.func
        yield from (function.name for function in functions)


def _canonical(name: str) -> str:
    """Returns a device's short name, such as ``/CPU:1``, for any of the names in TensorFlow."""
    spec = tf.DeviceSpec.from_string(name)
    return f"/{spec.device_type}:{spec.device_index or 0}"
