"""Calling one trace of a function with little around it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from worker.runtime.trace import Trace

pytestmark = pytest.mark.slow


def test_it_gives_what_the_function_gives_from_nested_inputs() -> None:
    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def function(pair: Any, named: Any) -> Any:
        return pair[0] - pair[1], named["z"] - named["a"]

    pair = (tf.constant(5.0), tf.constant(3.0))
    named = {"z": tf.constant(2.0), "a": tf.constant(1.0)}
    trace = Trace(function.get_concrete_function(pair, named))
    found = trace(tf.nest.flatten((pair, named)))
    assert [float(value) for value in found] == [2.0, 1.0]


def test_it_sees_the_variables_as_they_are_now_and_needs_nothing_else_alive() -> None:
    variable = tf.Variable([1.0, 2.0])

    def make() -> Trace:
        function = tf.function(lambda x: (tf.function(lambda y: y * variable)(x),))
        return Trace(function.get_concrete_function(tf.constant(3.0)))

    trace = make()
    gc.collect()
    for value in (1.0, 10.0):
        variable.assign([value, 2.0])
        (found,) = trace([tf.constant(3.0)])
        np.testing.assert_array_equal(found, [3 * value, 6.0])


def test_an_error_is_that_of_the_function_itself() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def picky(x: Any) -> Any:
        tf.debugging.assert_positive(x, "the message of the user")
        return (x,)

    trace = Trace(picky.get_concrete_function(tf.constant(1.0)))
    assert float(trace([tf.constant(2.0)])[0]) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)test_trace.*of the user"):
        trace([tf.constant(-2.0)])
