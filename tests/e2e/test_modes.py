"""Whole jobs on real clusters: what the two modes promise about the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint.load import load_variables
from tests.e2e.cluster import EXAMPLES, JOBS, ended, up

pytestmark = pytest.mark.slow

Variables = dict[str, npt.NDArray[np.float32]]


def plain_loop(job: Path, out: Path, *overrides: str) -> Variables:
    ended("tests.e2e.plain_loop", job, out, *overrides).check_returncode()
    return dict(np.load(out))


@pytest.fixture(scope="module")
def dense_loop(tmp_path_factory: pytest.TempPathFactory) -> Variables:
    return plain_loop(JOBS / "dense.py", tmp_path_factory.mktemp("loop") / "dense.npz")


def test_sync_ends_in_the_bits_of_a_plain_loop(dense_loop: Variables, tmp_path: Path) -> None:
    run = up(
        JOBS / "dense.py", tmp_path / "run", *("--mode", "sync", "--workers", "3", "--shards", "2")
    )
    # 62 batches of 20 (the last of 10) in rounds of 3: 21 rounds an epoch, none crosses it.
    assert run.summary["global_step"] == 42
    assert run.summary["batches"] == 124
    assert run.summary["examples"] == 2 * 1230
    trained = load_variables(run.checkpoint)
    assert set(dense_loop) == set(trained)
    for name, expected in dense_loop.items():
        np.testing.assert_array_equal(trained[name], expected, err_msg=name)


def test_sync_with_the_keras_engine_agrees_with_the_plain_loop(
    dense_loop: Variables, tmp_path: Path
) -> None:
    args = ("--mode", "sync", "--workers", "1", "--shards", "2", "--set", "engine=keras")
    run = up(JOBS / "dense.py", tmp_path / "run", *args)
    assert run.summary["global_step"] == 42
    trained = load_variables(run.checkpoint)
    for name, value in dense_loop.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_sync_on_two_devices_of_a_worker_agrees_with_the_plain_loop(
    dense_loop: Variables, tmp_path: Path
) -> None:
    devices = ("--devices", "cpu:2", "--set", "devices=columns")
    run = up(JOBS / "dense.py", tmp_path / "run", "--mode", "sync", *devices)
    assert "device='2 cpus'" in (run.run_dir / "logs" / "worker-a.log").read_text()
    trained = load_variables(run.checkpoint)
    for name, value in dense_loop.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sync_with_a_micro_batch_on_each_device_ends_in_the_same_bits(
    dense_loop: Variables, tmp_path: Path, workers: str
) -> None:
    options = ("--mode", "sync", "--workers", workers, "--shards", "2", "--devices", "cpu:2")
    run = up(JOBS / "dense.py", tmp_path / "run", *options)
    assert run.summary["batches"] == 124
    log = (run.run_dir / "logs" / "worker-a.log").read_text()
    assert "device='2 cpus'" in log
    trained = load_variables(run.checkpoint)
    for name, expected in dense_loop.items():
        np.testing.assert_array_equal(trained[name], expected, err_msg=name)


@pytest.mark.parametrize("sums", [False, True])
def test_async_with_a_batch_on_each_device_applies_every_batch_once(
    tmp_path: Path, sums: bool
) -> None:
    options = ["--mode", "async", "--shards", "2", "--devices", "cpu:2"]
    if sums:
        options += ["--workers", "1", "--set", "sum_devices=true", "--set", "max_staleness=0"]
    run = up(JOBS / "dense.py", tmp_path / "run", *options)
    summary = run.summary
    assert summary["global_step"] == summary["batches"] == 124
    assert (summary["examples"], summary["skipped"], summary["failed"]) == (2460, 0, 0)
    # Of two gradients that were computed at once one is older by the other, unless they are summed.
    assert summary["mean_staleness"] == 0 if sums else summary["mean_staleness"] >= 0.4
    assert summary["eval"]["accuracy"] > 0.7


def test_what_several_devices_cannot_do_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """tests/worker/lanes/test_lane_source.py has all of it."""
    arguments = ("--devices", "cpu:2", "--mode", "sync", "--replicas", "1")
    run = up(JOBS / "dense.py", tmp_path / "run", *arguments, check=False)
    assert run.code == 2
    assert "error PS506: " in run.stderr
    assert "a round has 1 micro-batch; give the worker 1" in run.stderr


def test_async_applies_every_batch_once_and_learns(tmp_path: Path) -> None:
    run = up(
        JOBS / "dense.py",
        tmp_path / "run",
        *("--mode", "async", "--workers", "2", "--shards", "2", "--set", "epochs=10"),
    )
    summary = run.summary
    assert summary["global_step"] == summary["batches"] == 620
    assert summary["examples"] == 12_300
    assert (summary["skipped"], summary["failed"]) == (0, 0)
    assert summary["eval"]["accuracy"] > 0.9
    assert (summary["mode"], summary["shards"], summary["workers"]) == ("async", 2, 2)
    assert run.checkpoint.name == "step-00000620"


def test_batch_normalization_and_dropout_evaluate_as_in_one_process(tmp_path: Path) -> None:
    """Two async epochs and two sync ones."""
    settings = ("engine=numpy", "then=sync", "then_after=2")
    sets = [word for setting in settings for word in ("--set", setting)]
    run = up(JOBS / "normalized.py", tmp_path / "run", "--workers", "2", "--shards", "2", *sets)
    alone = ended("benchmarks.single_process", JOBS / "normalized.py")
    alone.check_returncode()
    expected = json.loads(alone.stdout.splitlines()[-1])["eval"]["accuracy"]
    assert run.summary["eval"]["accuracy"] == pytest.approx(expected, abs=0.01)


def small_copy(example: str, folder: Path) -> Path:
    """The example beside a small slice of its data, where it looks for it."""
    (folder / "data").mkdir()
    with np.load(EXAMPLES / "data" / "mnist.npz") as whole:
        slices = {
            name: whole[name][: 2000 if "train" in name else 500]
            for name in ("x_train", "y_train", "x_test", "y_test")
        }
    np.savez(folder / "data" / "mnist.npz", **slices)
    return Path(shutil.copy(EXAMPLES / f"{example}.py", folder))


@pytest.mark.parametrize("example", ["mnist_dnn", "mnist_cnn", "module_regression"])
def test_examples_train_on_a_small_slice(tmp_path: Path, example: str) -> None:
    """tests/examples/test_examples.py trains the others, in one process."""
    run = up(small_copy(example, tmp_path), tmp_path / "run", "--set", "epochs=1")
    assert run.summary["phase"] == "done"
    assert run.summary["eval"]["loss"] > 0
