"""``model.fit`` on a local cluster whose processes, or whose caller, are killed or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from structlog.testing import capture_logs

import pserver
from tests.e2e.cluster import LIMIT_S, members, processes_of, until

pytestmark = [
    pytest.mark.slow,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RECORDS, EPOCHS = 640, 5
"""In whole batches, also without the fifth for validation: each other size is one more trace in
every process. The script has a short last batch."""

SCRIPT = """
import os
import signal

import keras
import numpy as np

import pserver

x = np.random.default_rng(1).normal(size=(700, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
model.compile("adam", "mse")


class Steps(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        print("epoch", epoch, int(self.model.optimizer.iterations), flush=True)


with pserver.Cluster(workers=2, run_dir="runs") as cluster:
    if not os.fork():
        # As a process of multiprocessing, it outlives a caller that is killed.
        os.read(0, 1)
        os._exit(0)
    try:
        model.fit(x, x[:, :1], epochs=100_000, verbose=0, callbacks=[Steps()])
    except KeyboardInterrupt:
        print("interrupted", int(model.optimizer.iterations), flush=True)
    weights = model.get_weights()
    model.fit(x, x[:, :1], epochs=1, verbose=0, callbacks=[Steps()])
    assert any((a != b).any() for a, b in zip(weights, model.get_weights()))
history = model.fit(x, x[:, :1], epochs=1, verbose=0)
print("plain", int(model.optimizer.iterations), flush=True)
"""


def small() -> tuple[keras.Model, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns a model with new weights of a fixed seed, and data."""
    keras.utils.set_random_seed(7)
    layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    x = np.random.default_rng(1).normal(size=(RECORDS, 6)).astype("float32")
    return model, x, x.sum(1, keepdims=True)


class Killing(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Kills a process of a role at the end of an epoch."""

    def __init__(self, cluster: pserver.Cluster, roles: dict[int, str]) -> None:
        super().__init__()
        self.killed: list[str] = []
        self._cluster = cluster
        self._roles = roles

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        role = self._roles.pop(len(self.model.history.epoch), None)
        if role is not None:
            assert self._cluster.run_dir is not None
            os.kill(members(self._cluster.run_dir, role)[0], signal.SIGKILL)
            self.killed.append(role)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pserver.Cluster]:
    where = tmp_path_factory.mktemp("cluster") / "runs"
    with pserver.Cluster(shards=2, workers=2, run_dir=where, intra_op_threads=1) as entered:
        yield entered


Fitted = tuple[keras.callbacks.History, list[Any]]
"""The history of a fit, and the weights after it."""


def fitted() -> Fitted:
    """Fits on the present cluster."""
    model, x, y = small()
    history = model.fit(x, y, epochs=EPOCHS, verbose=0, validation_split=0.2)
    return history, model.get_weights()


def test_fit_outlives_a_worker_and_a_shard_with_the_same_bits(cluster: pserver.Cluster) -> None:
    assert_outlives(cluster, {1: "worker", 3: "pserver"}, fitted())


def assert_outlives(cluster: pserver.Cluster, roles: dict[int, str], undisturbed: Fitted) -> None:
    """Fits once more, kills a process of each role in the epoch of its number, and compares."""
    whole, weights = undisturbed
    expected = list(roles.values())
    model, x, y = small()
    killing = Killing(cluster, roles)
    history = model.fit(x, y, epochs=EPOCHS, verbose=0, validation_split=0.2, callbacks=[killing])
    assert killing.killed == expected
    assert history.epoch == whole.epoch == list(range(EPOCHS))
    assert history.history == whole.history
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert cluster.run_dir is not None
    summary = json.loads((cluster.run_dir / "summary.json").read_text())
    steps = EPOCHS * 512 // 32
    assert summary["global_step"] == steps == int(model.optimizer.iterations)
    assert summary["counted"]["counted"] == summary["counted"]["batches"]
    assert (summary["counted"]["twice"], summary["counted"]["skipped"]) == (0, 0)


def test_fit_that_nothing_looks_at_outlives_its_coordinator(
    cluster: pserver.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = 20
    model, x, y = small()
    whole = model.fit(x, y, epochs=epochs, verbose=0)
    undisturbed, before = model.get_weights(), cluster.run_dir
    killed: list[int] = []

    def kill() -> None:
        until(lambda: cluster.run_dir != before, "the next run")
        assert cluster.run_dir is not None
        history = cluster.run_dir / "history.csv"
        until(lambda: history.exists() and "\n3," in history.read_text(), "three epochs")
        killed.extend(members(cluster.run_dir, "coordinator"))
        os.kill(killed[0], signal.SIGKILL)

    model, x, y = small()
    with ThreadPoolExecutor() as threads:
        killing = threads.submit(kill)
        # It holds where it stands, short of the end, while the progress bar waits for that.
        history = model.fit(x, y, epochs=epochs, verbose=2)
        killing.result()
    assert len(killed) == 1
    assert history.epoch == list(range(epochs))
    assert history.history == whole.history
    for one, other in zip(model.get_weights(), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert f"Epoch {epochs}/{epochs}" in capsys.readouterr().out


def test_a_callback_that_raises_ends_the_run_and_not_the_cluster(cluster: pserver.Cluster) -> None:
    model, x, y = small()

    def refuse(epoch: int, logs: Any) -> None:
        raise LookupError(f"no more after {epoch}")

    with pytest.raises(LookupError, match="no more after 0"):
        model.fit(
            x,
            y,
            epochs=50,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=refuse)],
        )
    assert cluster.run_dir is not None
    assert not processes_of(cluster.run_dir)
    assert model.fit(x, y, verbose=0).epoch == [0]


def test_the_caller_sees_warnings_of_the_job_once(cluster: pserver.Cluster) -> None:
    model, x, y = small()
    with capture_logs() as logs:
        history = model.fit(x * np.nan, y, verbose=0)
    assert np.isnan(history.history["loss"]).all()
    warned = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert len(set(warned)) == len(warned)
    assert any(line.startswith("PS603: ") for line in warned)


def test_nothing_is_left_of_a_cluster_whose_caller_is_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path) as caller:
        until_epoch(caller, 2)
        # The host, too, writes there.
        assert len(processes_of(tmp_path / "runs")) == 5
        caller.kill()
        until(lambda: not processes_of(tmp_path / "runs"), "the processes of the cluster to end")
    until(lambda: set(Path("/dev/shm").iterdir()) <= before, "its shared memory to go")


def test_ctrl_c_keeps_the_state_and_the_cluster(tmp_path: Path) -> None:
    with started(tmp_path) as caller:
        until_epoch(caller, 2)
        caller.send_signal(signal.SIGINT)
        output, _ = caller.communicate(timeout=LIMIT_S)
    assert caller.returncode == 0, output
    lines = [line.split() for line in output.splitlines()]
    interrupted = next(int(words[1]) for words in lines if words[0] == "interrupted")
    assert interrupted >= 3 * 22
    assert lines[-2:] == [["epoch", "0", str(interrupted + 22)], ["plain", str(interrupted + 44)]]


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts the script in ``folder``, and ends it with the context."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with (
        (folder / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, script],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as caller,
    ):
        try:
            yield caller
        finally:
            caller.kill()


def until_epoch(caller: subprocess.Popen[str], epoch: int) -> None:
    """Reads what the script prints until it has trained ``epoch``, from 0."""
    assert caller.stdout is not None
    for line in caller.stdout:
        if line.startswith(f"epoch {epoch} "):
            return
    raise AssertionError("the script ended")
