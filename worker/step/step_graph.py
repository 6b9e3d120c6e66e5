"""The graph of a training step: variables that it reads or assigns itself, and hidden gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from psrpc.core.errors import InvalidJob


def check_graph(graph: tf.Graph, model: keras.Model) -> None:
    """Refuses a training step that reads or assigns variables themselves. Those of the model are
    tensors to it; of others each worker would keep values of its own, and no checkpoint has them.

    Args:
        graph: of the traced step.

    Raises:
        InvalidJob: names the variable, and what to do instead.
    """
    inside = {id(outside): tensor for outside, tensor in graph.captures}
    saved = [layer for layer in model._flatten_layers() if isinstance(layer, _TFSM)]
    fixed = {id(variable) for layer in saved for variable in layer.weights}
    for variable in model.weights:
        if id(variable._value.handle) in inside and id(variable) not in fixed:
            raise compiled_apart(variable)
    handles = {id(variable.handle): variable.name for variable in graph.variables}
    names = {id(inside[each]): name for each, name in handles.items() if each in inside}
    # Most models have none of these, and have many operations.
    for operation in graph.get_operations() if names else ():
        for written in get_read_write_resource_inputs(operation)[1]:
            if id(written) in names:
                raise InvalidJob(
                    f"the forward pass assigns variable {names[id(written)]!r}, a tf.Variable "
                    "that Keras does not track, so no shard keeps it; make it a weight of a layer "
                    "(add_weight)",
                    code="PS108",
                )


def check_random(graph: tf.Graph) -> None:
    """Refuses a training step that draws random numbers from a generator of the process: a batch
    that another worker does, or that is done again, would get others.

    Raises:
        InvalidJob: names the operation, and what to draw from instead.
    """
    drawing = next((op for op in graph.get_operations() if op.type in _DRAWS), None)
    if drawing is not None:
        raise InvalidJob(
            f"the forward pass or the loss draws random numbers by itself ({drawing.type}, as "
            "tf.random does), so the model would depend on which worker has which batch; draw "
            "from a keras.random.SeedGenerator that is an attribute of a layer",
            code="PS108",
        )


def check_custom_gradients(values: Mapping[str, tf.Tensor]) -> None:
    """Refuses variables without a gradient that a custom gradient reads. It gives gradients of its
    arguments, and of variables, which are tensors here.

    Args:
        values: the tensors of variables, by name, in the graph of the traced step.

    Raises:
        InvalidJob: names the variable, and what to do instead.
    """
    for name, value in values.items():
        depending = _depending(value)
        for operation in {tensor.op for each in depending.values() for tensor in _outputs(each)}:
            # It passes on what the function gives and, after that, its arguments.
            passed = sum(tensor.ref() in depending for tensor in operation.inputs)
            if _has_custom_gradient(operation) and passed == 1:
                raise InvalidJob(
                    f"the loss depends on trainable variable {name!r} within a custom gradient "
                    "(tf.custom_gradient, tf.recompute_grad, keras.remat), which does not say its "
                    "gradient; give its value to the function as an argument",
                    code="PS108",
                )


def _depending(value: tf.Tensor) -> dict[Any, tf.Tensor]:
    """By reference, the tensors that may have a gradient with respect to ``value``."""
    found, todo = {value.ref(): value}, [value]
    while todo:
        for output in _outputs(todo.pop()):
            if output.ref() not in found:
                found[output.ref()] = output
                todo.append(output)
    return found


def _outputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What operations make of it that has a gradient."""
    return [
        output
        for operation in tensor.consumers()
        if operation.type != "StopGradient"
        for output in operation.outputs
        if output.dtype.is_floating
    ]


def _has_custom_gradient(operation: tf.Operation) -> bool:
    # It registers a gradient of its own for an operation that passes everything on.
    if operation.type != "IdentityN":
        return False
    kind: bytes = operation.node_def.attr["_gradient_op_type"].s
    return kind.startswith(b"CustomGradient")


_DRAWS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "StatefulUniformFullInt",
    "TruncatedNormal",
}
"""Operations with a state that is not in their arguments."""

_TFSM = keras.layers.TFSMLayer
"""Its function reads variables themselves, which do not change where they are not trained."""


def compiled_apart(variable: keras.Variable) -> InvalidJob:
    """The error for a variable that is read in a ``tf.function`` within the step."""
    return InvalidJob(
        f"the forward pass reads variable {variable.path!r} within a tf.function of its own, which "
        "would go on with the values that it was compiled with; leave tf.function out: workers "
        "compile the whole step",
        code="PS108",
    )
