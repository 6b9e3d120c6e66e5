"""Checks the graph of a training step: variables read or assigned directly, hidden gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from psrpc.core.errors import InvalidJob


def check_graph(graph: tf.Graph, model: keras.Model) -> None:
    """Refuses a training step that reads or assigns variables directly. The model's variables must
    be tensors to the step; other variables would have different values on each worker and be in no
    checkpoint. Raises InvalidJob with the variable's name and a remedy."""
    inside = {id(outside): tensor for outside, tensor in graph.captures}
    saved = [layer for layer in model._flatten_layers() if isinstance(layer, _TFSM)]
    fixed = {id(variable) for layer in saved for variable in layer.weights}
    for variable in model.weights:
        if id(variable._value.handle) in inside and id(variable) not in fixed:
            raise compiled_apart(variable)
    handles = {id(variable.handle): variable.name for variable in graph.variables}
    names = {id(inside[each]): name for each, name in handles.items() if each in inside}
    # Most models have no such variables, but many operations.
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
    """Refuses a training step that draws from a process-wide random generator, since another
    worker, or a repetition, would draw other numbers for the same batch. Raises InvalidJob with the
    operation's name and a remedy."""
    drawing = next((op for op in graph.get_operations() if op.type in _DRAWS), None)
    if drawing is not None:
        raise InvalidJob(
            f"the forward pass or the loss draws random numbers by itself ({drawing.type}, as "
            "tf.random does), so the model would depend on which worker has which batch; draw "
            "from a keras.random.SeedGenerator that is an attribute of a layer",
            code="PS108",
        )


def check_custom_gradients(values: Mapping[str, tf.Tensor]) -> None:
    """Refuses variables that have no gradient because only a custom gradient reads them. A custom
    gradient covers its arguments and each ``tf.Variable``, but in a step variables are plain
    tensors.

    Args:
        values: the variables without a gradient: their tensors, by name, in the graph of the traced
            step.

    Raises:
        InvalidJob: names the variable and a remedy.
    """
    for name, value in values.items():
        depending = _depending(value)
        for operation in {tensor.op for each in depending.values() for tensor in _outputs(each)}:
            # The operation passes on the function's results and then its arguments.
            passed = sum(tensor.ref() in depending for tensor in operation.inputs)
            if _has_custom_gradient(operation) and passed == 1:
                raise InvalidJob(
                    f"the loss depends on trainable variable {name!r} within a custom gradient "
                    "(tf.custom_gradient, tf.recompute_grad, keras.remat), which does not say its "
                    "gradient; give its value to the function as an argument",
                    code="PS108",
                )


def _depending(value: tf.Tensor) -> dict[Any, tf.Tensor]:
    """Returns, by reference, the tensors that may have a gradient with respect to ``value``."""
    found, todo = {value.ref(): value}, [value]
    while todo:
        for output in _outputs(todo.pop()):
            if output.ref() not in found:
                found[output.ref()] = output
                todo.append(output)
    return found


def _outputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the differentiable results of the operations that read ``tensor``."""
    return [
        output
        for operation in tensor.consumers()
        if operation.type != "StopGradient"
        for output in operation.outputs
        if output.dtype.is_floating
    ]


def _has_custom_gradient(operation: tf.Operation) -> bool:
    # TensorFlow registers a custom gradient for an operation that passes everything on.
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
"""Random operations whose state is not among their arguments."""

_TFSM = keras.layers.TFSMLayer
"""A layer whose function reads variables directly; they are constant unless trained."""


def compiled_apart(variable: keras.Variable) -> InvalidJob:
    """Returns the error for a variable that a ``tf.function`` within the step reads."""
    return InvalidJob(
        f"the forward pass reads variable {variable.path!r} within a tf.function of its own, which "
        "would go on with the values that it was compiled with; leave tf.function out: workers "
        "compile the whole step",
        code="PS108",
    )
