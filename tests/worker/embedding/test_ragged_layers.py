"""Layers of Keras and records of different lengths: which fail, and what works instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.errors import InvalidJob
from tests.worker.described_jobs import described
from worker import Arrays, Embedding, Ragged

pytestmark = pytest.mark.slow
layers = keras.layers

KIND = np.arange(60) % 3
IDS = Ragged.from_rows([[1 + i % 4] * (i % 3) for i in range(60)])
VECTORS = Ragged(np.ones((120, 2), np.float32), np.arange(0, 121, 2))
PAGE = Path(__file__).parents[3] / "docs" / "embeddings.md"


def lstm(width: int | None = None) -> keras.Model:
    x = keras.Input((width, 2), name="x")
    return keras.Model(x, layers.Dense(3)(layers.LSTM(4)(x)))


def of_ids(embedding: Callable[[], Any], *, recurrent: bool = True) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        x = keras.Input((None,), dtype="int64", name="x")
        h = embedding()(x)
        return keras.Model(x, layers.Dense(3)(layers.LSTM(4)(h) if recurrent else h))

    return build


def ours(**options: Any) -> Callable[[], Any]:
    return lambda: Embedding(2, vocabulary=5, table="ids", **options)


class Called(keras.Model):  # type: ignore[misc]
    """Declares no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.kind = layers.LSTM(4), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.kind(self.memory(x["words"]))


ADVICE = (
    " of the data is ragged, which worker.Embedding takes and most layers of Keras, such as LSTM, "
    "do not: give ids to a worker.Embedding with a combiner, or pad records to one length in map= "
    "of the data source (docs/embeddings.md)"
)


@pytest.mark.parametrize(
    ("model", "x", "says"),
    [
        (lstm, VECTORS, "ragged dimension.; x" + ADVICE),
        (
            lambda: lstm(7),
            VECTORS,
            "x of the data has shape [n, any, 2], the input takes [n, 7, 2]",
        ),
        (Called, {"words": VECTORS}, "; x['words']" + ADVICE),
        (of_ids(lambda: layers.Embedding(5, 2)), IDS, "; x" + ADVICE),
        (of_ids(ours()), {"x": IDS}, "; x['x']" + ADVICE),
    ],
)
def test_a_layer_that_takes_no_ragged_data_is_said_to(
    model: Callable[[], keras.Model], x: Any, says: str
) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(model=model, metrics=[], train=Arrays(x, KIND))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "embedding", [ours(padding=0), lambda: layers.Embedding(5, 2, mask_zero=True)]
)
def test_the_documented_map_pads_them(embedding: Callable[[], Any]) -> None:
    [code] = re.findall(r"^(def padded.*?)\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"keras": keras}
    exec(code, names)  # of our own page
    source = Arrays(IDS, KIND, map=names["padded"])
    assert source.read_range(0, 3)[0].tolist() == [[0] * 20, [2] + [0] * 19, [3, 3] + [0] * 18]
    assert described(model=of_ids(embedding), metrics=[], train=source)["train_records"] == 60


def test_a_combiner_takes_them_as_they_are() -> None:
    model = of_ids(ours(combiner="mean"), recurrent=False)
    assert described(model=model, metrics=[], train=Arrays(IDS, KIND))["tables"]
