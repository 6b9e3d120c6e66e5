"""Tensors in shared memory, on connections of their own and with the calls: the same results, and
nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Literal

import h5py
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint.checkpoint import read_manifest
from psrpc.checkpoint.load import load_state, load_variables
from tests.e2e.cluster import (
    JOBS,
    Gate,
    Run,
    by_hand,
    ended,
    holders,
    maps,
    members,
    processes_of,
    segments,
    until,
    up,
)

pytestmark = pytest.mark.slow

GATED = JOBS / "gated.py"

NDArray = npt.NDArray[Any]
Transport = Literal["shared memory", "data connection", "calls"]
Exact = Callable[[str], dict[str, NDArray]]

OPTIONS: dict[Transport, tuple[str, ...]] = {
    "shared memory": (),
    "data connection": ("--no-shm",),
    "calls": ("--no-shm", "--data-connections", "off"),
}

CLUSTERS = {
    "sync": ("--mode", "sync", "--workers", "2", "--shards", "2"),
    "async": ("--mode", "async", "--workers", "1", "--shards", "1"),
}
"""The result of the first does not depend on its numbers. That of the second does on the order of
the pushes, which with one worker is that of the batches."""


def train(folder: Path, transport: Transport, *args: str) -> Run:
    """Runs the gated job, and looks in its midst where the tensors are."""
    folder.mkdir(exist_ok=True)
    with by_hand(folder) as hand, closing(Gate(folder, epoch=1)) as gate:
        shm = transport == "shared memory"
        args = ("--run-dir", str(hand.run_dir), *OPTIONS[transport], *args)
        cluster = hand.start("up", "coordinator", "up", GATED, *args, **gate.environment)
        cluster.wait_for("training  epoch 2/")
        workers = members(hand.run_dir, "worker")
        shards = members(hand.run_dir, "pserver")
        assert workers
        assert shards
        if shm:
            # One that was slow to start has not met the shards before it was held at the gate.
            until(lambda: shared(workers, shards), f"segments\n{hand.logs()}")
            assert any(map(gradient_in_segment, workers))
        else:
            assert not any(map(segments, workers + shards))
            logs = [path.read_text() for path in (hand.run_dir / "logs").glob("worker*.log")]
            counts = [log.count("tensors have a connection of their own") for log in logs]
            # One that was slow to start has not met the shards yet.
            assert max(counts) == (len(shards) if transport == "data connection" else 0)
        assert not any("/dev/shm" in maps(pid) for pid in processes_of(hand.run_dir))
        gate.open()
        code = cluster.wait()
        run = Run(hand.run_dir, code, cluster.text(), "")
        assert code == 0, f"{run.stdout}\n{run.logs()}"
    assert not processes_of(run.run_dir), "a process outlived the job"
    return run


def shared(workers: list[int], shards: list[int]) -> bool:
    """Whether each worker has one segment, and each shard those of all workers."""
    theirs = [segments(worker) for worker in workers]
    everything = set().union(*theirs)
    return len(everything) == len(workers) and all(
        [*(len(one) == 1 for one in theirs), *(segments(shard) == everything for shard in shards)]
    )


def gradient_in_segment(worker: int) -> bool:
    """Whether a worker has left anything in the outbox, which is at the end of its segment and is
    written for shared memory alone."""
    for link in Path(f"/proc/{worker}/fd").iterdir():
        if str(link.readlink()).startswith("/memfd:pserver-segment"):
            return any(link.read_bytes()[-512:])
    return False


def assert_equal(found: dict[str, NDArray], expected: dict[str, NDArray]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_differ(found: dict[str, NDArray], other: dict[str, NDArray]) -> None:
    assert any(not np.array_equal(found[name], value) for name, value in other.items())


def assert_not_rounded(variables: dict[str, NDArray]) -> None:
    """They are float32, and not because something rounded was put there."""
    for name, value in variables.items():
        assert value.dtype == np.float32, name
        for dtype in (ml_dtypes.bfloat16, np.float16):
            assert not np.array_equal(value.astype(dtype).astype(np.float32), value), name


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Exact:
    """The variables after training over shared memory in float32, by mode."""
    folder = tmp_path_factory.mktemp("exact")

    @cache
    def variables(mode: str) -> dict[str, NDArray]:
        return load_variables(train(folder / mode, "shared memory", *CLUSTERS[mode]).checkpoint)

    return variables


@pytest.mark.parametrize("transport", ["data connection", "calls"])
def test_all_transports_end_in_the_same_bits(
    exact: Exact, tmp_path: Path, transport: Transport
) -> None:
    run = train(tmp_path / "tcp", transport, *CLUSTERS["sync"])
    assert run.summary["examples"] == 3 * 1230
    assert_equal(load_variables(run.checkpoint), exact("sync"))


def test_rounding_and_compression_train_alike_over_both_transports(
    exact: Exact, tmp_path: Path
) -> None:
    """tests/pserver/client/test_exchange.py has every encoding over both, and tests/worker/
    test_feedback.py what training does with that which was left out."""
    args = [*CLUSTERS["async"], "--set", "wire_dtype=bfloat16", "--set", "compression=int8"]
    over_memory = train(tmp_path / "memory", "shared memory", *args)
    over_tcp = train(tmp_path / "tcp", "data connection", *args)
    trained = load_variables(over_memory.checkpoint)
    assert_equal(load_variables(over_tcp.checkpoint), trained)
    assert_differ(trained, exact("async"))
    assert_not_rounded(trained)
    # Untrained, it is right by chance, and its loss about ln 4.
    assert over_memory.summary["eval"]["accuracy"] > 0.85
    assert over_memory.summary["eval"]["loss"] < 0.5


def test_a_resumed_job_may_change_its_wire_dtype(exact: Exact, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    args = ("--mode", "sync", "--workers", "1")
    for epochs, wire in ((1, "bfloat16"), (3, "float32")):
        more = ("--resume",) if epochs > 1 else ()
        sets = ("--set", f"wire_dtype={wire}", "--set", f"epochs={epochs}")
        run = up(GATED, run_dir, *args, *sets, *more)
        assert run.summary["global_step"] == 21 * epochs
    trained = load_variables(run.checkpoint)
    assert_not_rounded(trained)
    expected = exact("sync")
    assert_differ(trained, expected)
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=0.005, err_msg=name)

    exported = tmp_path / "model.weights.h5"
    ended("coordinator", "export", run_dir, "--to", exported).check_returncode()
    found = []
    with h5py.File(exported) as file:
        file.visititems(lambda _, item: found.append(item[()]) if hasattr(item, "dtype") else None)
    for value in trained.values():
        assert any(each.dtype == value.dtype and np.array_equal(each, value) for each in found)


def test_a_killed_worker_loses_and_leaves_nothing(exact: Exact, tmp_path: Path) -> None:
    """Every batch counts once, and the rounds that the other one computes are the same rounds. The
    shards let go of the memory that they shared with it. test_recovery.py has async mode."""
    with by_hand(tmp_path) as hand, closing(Gate(tmp_path, epoch=2)) as gate:
        args = ("--run-dir", hand.run_dir, *CLUSTERS["sync"], "--max-restarts", "0")
        cluster = hand.start("up", "coordinator", "up", GATED, *args, **gate.environment)
        # In the midst of its steps, if it has not come to the gate by now.
        cluster.wait_for("training  epoch [23]/")
        victim, survivor = members(hand.run_dir, "worker")
        shards = members(hand.run_dir, "pserver")
        until(lambda: shared([victim, survivor], shards), f"segments\n{hand.logs()}")
        (segment,) = segments(victim)
        os.kill(victim, signal.SIGKILL)
        until(lambda: not holders(segment), "the shards to let go")
        # It may be about to join the next generation, with another segment.
        until(lambda: shared([survivor], shards), "the other worker to share memory")
        gate.open()
        assert cluster.wait() == 0, cluster.text()
        run = Run(hand.run_dir, 0, cluster.text(), "")
    assert run.summary["batches"] == 3 * 62
    assert run.summary["examples"] == 3 * 1230
    plan = read_manifest(run.checkpoint).plan
    for shard in range(2):
        state = load_state(run.checkpoint, plan, shard)
        assert state.version == run.summary["global_step"] == 3 * 21
        assert [epoch["applied"] for epoch in state.applied] == 3 * [[[0, 1230]]]
    assert_equal(load_variables(run.checkpoint), exact("sync"))


def test_a_worker_whose_shard_is_killed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with by_hand(tmp_path) as hand, closing(Gate(tmp_path, epoch=1)) as gate:
        coordinator = hand.coordinator(GATED, "--shards", "2", "--mode", "async")
        where = ("--coordinator", coordinator.wait_for(r"127\.0\.0\.1:\d+")[0])
        survivor, victim = (
            hand.start(f"shard-{k}", "pserver", "serve", "--shard", str(k), *where)
            for k in range(2)
        )
        args = ("worker", "run", *where, "--connect-timeout", "3")
        worker = hand.start("worker", *args, **gate.environment)
        until(lambda: len(segments(victim.popen.pid)) == 1, f"a segment\n{hand.logs()}")
        (segment,) = segments(victim.popen.pid)
        assert set(holders(segment)) == {p.popen.pid for p in (survivor, victim, worker)}

        # Killed while it has an exchange to answer.
        victim.kill(signal.SIGSTOP)
        gate.open()
        worker.wait_for("waiting for .*shard 1")
        victim.kill()
        assert worker.wait() == 1, hand.logs()
        line = worker.text().strip().splitlines()[-1]
        assert line.startswith("error PS202: shard 1 at 127.0.0.1:"), line
        assert "did not answer" in line
        until(lambda: not segments(survivor.popen.pid), "the other shard to let go")
        assert not holders(segment)
        assert "/dev/shm" not in maps(survivor.popen.pid)
