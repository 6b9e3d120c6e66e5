"""Baskets of any number of things, also none: ragged ids of a growing table, and a dense layer on
the mean of their rows.

The records are arrays, or with ``data`` the same in a TFRecord file, which this file also writes.
``tests.e2e.plain_table_loop`` builds the same network on a whole table.
"""

import keras
import numpy as np
import tensorflow as tf

from pserver import Arrays, Embedding, Job, Ragged, TfRecords, setting

WIDTH, THINGS, RECORDS = 4, 200, 410
INITIAL = 0.1
RATE, MOMENTUM = 0.05, 0.5
DATA = setting("data", "")

rng = np.random.default_rng(6)
names = rng.integers(-(2**63), 2**63 - 1, THINGS)
"""Ids of the things, all over int64."""

x = Ragged.from_rows(
    names[rng.zipf(1.3, size=count) % THINGS] for count in rng.integers(0, 6, RECORDS)
)
y = np.diff(x.row_splits)[:, np.newaxis].astype("float32")


def write(path: str) -> None:
    """The records as a TFRecord file."""
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(RECORDS):
            ids = tf.train.Int64List(value=x[number : number + 1].values)
            label = tf.train.FloatList(value=y[number])
            feature = {
                "ids": tf.train.Feature(int64_list=ids),
                "y": tf.train.Feature(float_list=label),
            }
            record = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(record.SerializeToString())


def parse(serialized: tf.Tensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
    features = {
        "ids": tf.io.RaggedFeature(tf.int64),
        "y": tf.io.FixedLenFeature([1], tf.float32),
    }
    found = tf.io.parse_example(serialized, features)
    return found["ids"], found["y"]


def network(rows: keras.layers.Layer) -> keras.Model:
    ids = keras.Input((None,), dtype="int64", ragged=True)
    start = keras.initializers.GlorotUniform(seed=3)
    return keras.Model(ids, keras.layers.Dense(1, kernel_initializer=start, name="out")(rows(ids)))


def model() -> keras.Model:
    start = keras.initializers.Constant(INITIAL)
    return network(Embedding(WIDTH, initializer=start, combiner="mean", name="things"))


job = Job(
    model=model,
    loss=keras.losses.MeanSquaredError(),
    optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
    train=TfRecords(DATA, parse, batched=True) if DATA else Arrays(x, y),
    eval=Arrays(x[:100], y[:100]),
    batch_size=20,
    epochs=2,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
)
