"""Rows of a trained table outside of a job: read from checkpoints, found, and in Keras's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pserver.tables.initial import InitialRows
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.tables import TableSpec
from tests.psrpc.rows import DictTable, chain, plan_of, rows_of
from worker import Embedding
from worker.embedding.lookups import look_up
from worker.embedding.model_tables import (
    MappedTables,
    fetch_tables,
    leave_tables,
    place_tables,
    trained_tables,
    write_tables,
)
from worker.embedding.trained import (
    KnownRows,
    TableState,
    TrainedTable,
    load_table_state,
    rows_left_out,
    state_arrays,
    state_of_arrays,
)

pytestmark = [
    pytest.mark.slow,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def as_dict(state: TableState, like: DictTable) -> DictTable:
    table = DictTable(like.spec, like.slots)
    table.take(state.rows)
    table.take(state.candidates)
    return table


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_and_a_file_give_all_of_a_table(tmp_path: Path, shards: int) -> None:
    checkpoints, tables = chain(tmp_path, plan_of(shards))
    states = [load_table_state(checkpoints[-1], table.spec.name) for table in tables]
    found = [as_dict(*pair) for pair in zip(states, tables, strict=True)]
    assert rows_of(found) == rows_of(tables)
    read = [state_of_arrays(state_arrays(state)) for state in states]
    assert [state.spec for state in read] == [table.spec for table in tables]
    assert rows_of([as_dict(*pair) for pair in zip(read, tables, strict=True)]) == rows_of(tables)


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    checkpoints, tables = chain(tmp_path, plan_of(1))
    arrays = state_arrays(load_table_state(checkpoints[-1], tables[0].spec.name))
    for name, other in (
        ("values", arrays["values"][:-1]),
        ("values", arrays["values"][:, 1:]),
        ("slot_0", arrays["slot_0"][1:]),
        ("ids", arrays["ids"][::-1]),
        ("about", np.zeros(3, np.uint8)),
    ):
        with pytest.raises(ValueError, match=r"do not fit|Expecting"):
            state_of_arrays({**arrays, name: other})
    del arrays["counts"]
    with pytest.raises(ValueError, match="array 'counts' is missing"):
        state_of_arrays(arrays)


SPEC = TableSpec(
    "words",
    2,
    20,
    {"class_name": "uniform", "config": {"low": 1.0, "high": 2.0}},
    {"class_name": "SGD", "config": {"learning_rate": 0.1}},
    seed=5,
)
IDS = np.array([3, 4, 11], np.int64)
VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)
INITIAL = np.empty((20, 2), np.float32)
InitialRows(SPEC).fill(np.arange(20), INITIAL)
WHOLE = INITIAL.copy()
WHOLE[IDS] = VALUES


def state() -> TableState:
    table = DictTable(SPEC, {})
    table.touch(IDS.tolist(), 1)
    arrays: dict[str, Any] = {
        "ids": IDS,
        "values": VALUES,
        "counts": np.ones(3, np.uint32),
        "touched": np.ones(3, np.uint32),
    }
    whole = table.part(0, 1)
    none = dict(zip(("ids", "counts", "touched"), whole.candidates, strict=True))
    about = state_arrays(
        TableState(SPEC, Columns(**arrays, slots={}), Columns(**none))  # type: ignore[arg-type]
    )
    return state_of_arrays(about)


class Columns:
    """Stands for rows or candidates."""

    def __init__(self, **columns: Any) -> None:
        vars(self).update(columns)


def model_of(**options: Any) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    rows = Embedding(2, 20, initializer="zeros", name="words", **options)(ids)
    return keras.Model(ids, rows)


def with_rows(**options: Any) -> keras.Model:
    model = model_of(**options)
    model.get_layer("words").take_trained(TrainedTable(SPEC, None, state()))
    return model


def test_ids_without_a_row_have_their_initial_values() -> None:
    known = KnownRows(SPEC, IDS, VALUES)
    ids = np.array([11, 0, 4, 11, 19], np.int64)
    np.testing.assert_array_equal(known.read(ids), WHOLE[ids])
    none = KnownRows(SPEC, IDS[:0], VALUES[:0])
    np.testing.assert_array_equal(none.read(ids), INITIAL[ids])


@pytest.mark.parametrize("traced", [False, True])
def test_layers_look_their_own_rows_up(traced: bool) -> None:
    def call(model: keras.Model, x: Any) -> Any:
        run = tf.function(model) if traced else model
        return run(tf.constant(x, tf.int64)).numpy()

    x = np.array([[3, 0, 11], [4, 4, 7]])
    np.testing.assert_array_equal(call(with_rows(), x), WHOLE[x])
    np.testing.assert_array_equal(call(with_rows(combiner="sum"), x), WHOLE[x].sum(1))
    padded = WHOLE.copy()
    padded[4] = 0
    np.testing.assert_array_equal(call(with_rows(padding=4), x), padded[x])
    mean = call(with_rows(padding=4, combiner="mean"), x)
    np.testing.assert_allclose(mean, [WHOLE[x[0]].mean(0), WHOLE[7]], rtol=1e-6)
    x[0, 0] = 99
    np.testing.assert_array_equal(
        call(with_rows(out_of_vocabulary="clip"), x), WHOLE[np.clip(x, 0, 19)]
    )
    assert not call(with_rows(out_of_vocabulary="drop"), x)[0, 0].any()
    expected = tf.errors.OpError if traced else InvalidJob
    with pytest.raises(expected, match="was given id 99, which table 'words' has not"):
        call(with_rows(), x)


def test_files_of_keras_have_the_rows(tmp_path: Path) -> None:
    model, x = with_rows(), np.array([[3, 0, 11]])
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(read(x), WHOLE[x])
    # The seed of another job does not change the ids that it has not trained.
    assert read.get_layer("words").get_config()["seed"] == SPEC.seed
    model.save_weights(tmp_path / "rows.weights.h5")
    read = model_of()
    read.load_weights(tmp_path / "rows.weights.h5")
    np.testing.assert_array_equal(read(x), WHOLE[x])
    with rows_left_out():
        model.save_weights(tmp_path / "none.weights.h5")
    read.load_weights(tmp_path / "none.weights.h5")
    assert read.get_layer("words").trained is None
    ids = keras.Input((3,), dtype="int64")
    wider = keras.Model(ids, Embedding(3, 20, name="words")(ids))
    with pytest.raises(ValueError, match=r"has width 3 and vocabulary 20, and .* file 2 and 20"):
        wider.load_weights(tmp_path / "rows.weights.h5")


def test_rows_are_fetched_when_asked_or_for_callbacks(tmp_path: Path) -> None:
    checkpoints, tables = chain(tmp_path, plan_of(2))
    ids = keras.Input((3,), dtype="int64")
    layers = [Embedding(3, name=name, table="user") for name in ("one", "other")]
    model = keras.Model(ids, [layer(ids) for layer in layers])
    with pytest.raises(InvalidJob, match=r"layer 'one' .* not been trained yet; .* before fetch"):
        fetch_tables(model)
    x = np.array([[0, -19, 1 << 62]])
    place_tables(model, checkpoints[0], plan_of(2).tables)
    before = model(x)
    place_tables(model, checkpoints[-1], plan_of(2).tables)
    leave_tables(model)
    why = r"layer '\w+' has no rows in this process: those of table 'user' are in .*cluster.fetch"
    with pytest.raises(InvalidJob, match=why):
        model(x)
    fetch_tables(model)
    one, other = model(x)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one[0], [tables[0].rows[id_].values for id_ in x[0].tolist()])
    assert (one.numpy() != before[0].numpy()).any()
    (table,) = trained_tables(model).values()
    assert table.spec.seed == layers[1].options.seed == 1

    write_tables(tmp_path / "files", model)
    with look_up(MappedTables(tmp_path / "files")):
        np.testing.assert_array_equal(model(x)[0], one)

    place_tables(model, tmp_path / "none", plan_of(2).tables)
    with pytest.raises(CheckpointError, match=r"of table 'user' were in .*none', which is gone"):
        fetch_tables(model)


def test_a_saved_model_without_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"'words' has rows that a SavedModel .* --to DIR/"):
        with_rows().export(tmp_path / "model", verbose=False)


def test_a_model_without_tables_has_nothing_to_fetch() -> None:
    with pytest.raises(InvalidJob, match=r"has no pserver.Embedding; there is nothing to fetch"):
        fetch_tables(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    with pytest.raises(InvalidJob, match=r"model is a str; fetch takes a keras.Model"):
        fetch_tables("model.keras")
