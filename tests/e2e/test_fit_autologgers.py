"""MLflow and W&B record a ``fit`` on a cluster as they record a plain one."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import pserver
from tests.e2e.cluster import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fit,
    # Of Keras, and of packages that these bring.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EPOCHS = 2
ADVICE = "is not installed: pip install -e '.[loggers]'"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> pserver.Cluster:
    return pserver.Cluster(run_dir=tmp_path_factory.mktemp("runs"), batch_hooks_every=1)


def fit(callbacks: list[Any]) -> dict[str, list[float]]:
    """Fits a small model; returns the history."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name="recorded")
    model.compile(keras.optimizers.SGD(0.05, name="sgd"), "mse", metrics=["mae"])
    x = np.random.default_rng(1).normal(size=(64, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    return dict(
        model.fit(
            x,
            y,
            batch_size=16,
            epochs=EPOCHS,
            validation_split=0.25,
            verbose=0,
            callbacks=callbacks,
        ).history
    )


def test_mlflow_autologs(
    cluster: pserver.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason=f"mlflow {ADVICE}")
    import mlflow.keras as mlflow_keras

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = mlflow.MlflowClient()

    def recorded() -> tuple[dict[str, str], dict[str, list[tuple[int, float]]], list[str]]:
        """Parameters, metrics with their steps, and files of the last run."""
        found = mlflow.last_active_run()
        name = found.info.run_id
        metrics = {
            key: [(each.step, each.value) for each in client.get_metric_history(name, key)]
            for key in found.data.metrics
        }
        assert found.info.status == "FINISHED"
        return found.data.params, metrics, [each.path for each in client.list_artifacts(name)]

    # Models are saved by mlflow alone, after the fit.
    mlflow_keras.autolog(log_models=False)
    try:
        fit([])
        known = recorded()
        with cluster:
            before = fit([])
            found_before = recorded()
            mlflow_keras.autolog(disable=True)
            fit([])
            assert recorded() == found_before
            # Called within, too.
            mlflow_keras.autolog(log_models=False)
            within = fit([])
            found_within = recorded()
    finally:
        mlflow_keras.autolog(disable=True)
    for history, (params, metrics, files) in ((before, found_before), (within, found_within)):
        assert params == known[0]
        assert {name: [step for step, _ in each] for name, each in metrics.items()} == {
            name: [step for step, _ in each] for name, each in known[1].items()
        }
        assert files == known[2]
        for name, values in history.items():
            assert [value for _, value in metrics[name]] == values


@pytest.mark.parametrize("every", ["epoch", 2])
def test_wandb_logs_metrics(
    cluster: pserver.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    wandb = pytest.importorskip("wandb", reason=f"wandb {ADVICE}")
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def logged() -> tuple[dict[str, list[float]], list[dict[str, float]]]:
        """The history of a fit, and the rows that W&B has of it."""
        run = wandb.init(project="fit", dir=tmp_path)
        history = fit([WandbMetricsLogger(log_freq=every)])
        folder = Path(run.dir).parent
        run.finish()
        (path,) = folder.glob("*.wandb")
        # Another process writes it.
        until(lambda: any(each.HasField("exit") for each in messages(path)), "W&B's file")
        return history, list(rows(path))

    _, known = logged()
    with cluster:
        history, found = logged()
    assert known
    assert [sorted(row) for row in found] == [sorted(row) for row in known]
    steps = [
        [(row.get("epoch/epoch"), row.get("batch/batch_step")) for row in each]
        for each in (found, known)
    ]
    assert steps[0] == steps[1]
    ended = [row for row in found if "epoch/loss" in row]
    for name, values in history.items():
        assert [row[f"epoch/{name}"] for row in ended] == values
    assert {round(row["epoch/learning_rate"], 6) for row in ended} == {0.05}


BLOCK = 32768
"""Bytes of a block in W&B's file, which is a log as of LevelDB."""


def rows(path: Path) -> Iterator[dict[str, float]]:
    """Yields what was logged, without W&B's own fields."""
    for message in messages(path):
        if message.HasField("history"):
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in message.history.item
            }
            yield {name: value for name, value in row.items() if not name.startswith("_")}


def messages(path: Path) -> Iterator[Any]:
    """Yields the messages of a file: each part has a checksum, a length, and a byte that says what
    it is: 1 all of a message, 2 the first part, 3 one within, 4 the last."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4) and at <= len(data):
            yield Record.FromString(record)
            record = b""
