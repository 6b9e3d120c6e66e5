"""Results of parts are joined as Keras joins those of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import potentially_ragged_concat

from psrpc.core.errors import InvalidJob
from worker.predict.results import (
    add_states,
    join_outputs,
    load_result,
    metric_states,
    result_is_there,
    save_result,
)

pytestmark = pytest.mark.slow

DENSE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
PARTS: dict[str, list[Any]] = {
    "dense": [DENSE, DENSE[:1]],
    "rows of other lengths": [DENSE, DENSE[:, :2], DENSE[:1]],
    "other lengths within": [DENSE, DENSE[:, :, :2]],
    "ragged": [tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[4]])],
}


@pytest.mark.parametrize("case", PARTS)
def test_joined_outputs_are_what_keras_makes_of_batches(case: str) -> None:
    parts = PARTS[case]
    found = join_outputs(None, parts)
    expected = potentially_ragged_concat(
        list(map(tf.convert_to_tensor, parts)) if case != "ragged" else parts
    )
    if isinstance(expected, tf.RaggedTensor):
        assert isinstance(found, tf.RaggedTensor)
        assert found.to_list() == expected.to_list()
    else:
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, expected)


def test_parts_of_which_one_is_ragged_are_joined() -> None:
    found = join_outputs(None, [DENSE[:, :, 0], tf.ragged.constant([[1.0]])])
    assert found.to_list() == [*DENSE[:, :, 0].tolist(), [1.0]]


def test_sparse_parts_are_joined() -> None:
    parts = [tf.sparse.from_dense([[1, 0]]), tf.sparse.from_dense([[0, 2], [3, 0]])]
    dense = tf.sparse.to_dense(join_outputs(None, parts))
    np.testing.assert_array_equal(dense, [[1, 0], [0, 2], [3, 0]])


def test_a_nest_keeps_the_form_of_a_functional_model() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, (keras.layers.Dense(1)(inputs), {"b": inputs}))
    one, other = np.ones((2, 1)), np.zeros((2, 4))
    found = join_outputs(model, [[one, {"b": other}], [one, {"b": other}]])
    assert isinstance(found, tuple)
    assert found[1]["b"].shape == (4, 4)


def test_a_result_is_there_once_it_is_whole(tmp_path: Path) -> None:
    assert not result_is_there(tmp_path, 3)
    save_result(tmp_path, 3, {"a": DENSE})
    # Of a part that was killed after this.
    save_result(tmp_path, 3, {"a": DENSE})
    assert result_is_there(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["part-3.result"]
    np.testing.assert_array_equal(load_result(tmp_path, 3)["a"], DENSE)


def measured() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(None, "mse", metrics=["mae"])
    model.evaluate(np.ones((2, 4)), np.ones((2, 1)), verbose=0)
    return model


def test_states_add_up_from_the_first_part_on() -> None:
    model = measured()
    states = metric_states(model)
    before = model.get_metrics_result()
    add_states(model, states, first=True)
    add_states(model, states, first=False)
    assert model.get_metrics_result() == before
    for one, other in zip(metric_states(model), states, strict=True):
        np.testing.assert_array_equal(one, 2 * other)


def test_states_of_other_metrics_are_refused() -> None:
    model = measured()
    with pytest.raises(InvalidJob, match="have 4 variables here, and 3 of other shapes"):
        add_states(model, metric_states(model)[:-1], first=True)
