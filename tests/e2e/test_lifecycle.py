"""Clusters started by hand, stopped, taken up again, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from coordinator.cli import __main__ as cli
from psrpc.checkpoint.load import load_variables
from psrpc.net.channel import open_channel
from psrpc.net.health import why_unhealthy
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from tests.e2e.cluster import (
    JOBS,
    LIMIT_S,
    Process,
    Run,
    by_hand,
    codes,
    command_line,
    ended,
    environment,
    processes_of,
    up,
    wait_until_gone,
)
from tests.e2e.test_modes import plain_loop

pytestmark = pytest.mark.slow

DENSE = JOBS / "dense.py"


def free_port() -> int:
    """A port that was free a moment ago: processes that start before the coordinator need one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_processes_may_start_in_any_order_and_end_by_themselves(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    where = ("--coordinator", address)
    with by_hand(tmp_path) as hand:
        worker = hand.start("worker", "worker", "run", *where)
        worker.wait_for(f"waiting for the coordinator at {address}")
        second = hand.start("shard-1", "pserver", "serve", "--shard", "1", *where)
        second.wait_for("waiting for the coordinator")
        coordinator = hand.coordinator(DENSE, "--shards", "2", "--mode", "sync", bind=address)
        coordinator.wait_for("waiting .*shard 0")
        worker.wait_for("waiting .*shard 0")
        hand.start("shard-0", "pserver", "serve", "--shard", "0", *where)
        assert codes(hand.processes) == [0, 0, 0, 0], hand.logs()
    assert (hand.run_dir / "summary.json").exists()


def test_a_shard_is_reached_at_the_address_it_advertises_in_plaintext_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with by_hand(tmp_path) as hand:
        bound = ("--run-dir", hand.run_dir, "--bind", "0.0.0.0:0")
        coordinator = hand.start(
            *("coordinator", "coordinator", "serve", "--job", DENSE, *bound),
            PSERVER_INSECURE="true",
        )
        said = coordinator.wait_for(r"INSECURE: anyone who reaches its ports .*\n")[0]
        assert "why='--insecure (PSERVER_INSECURE)'" in said
        at = coordinator.wait_for(r"0\.0\.0\.0:(\d+)")[1]
        address = f"127.0.0.1:{at}"
        where = ("--coordinator", address)
        shard = hand.start(
            "shard",
            "pserver",
            *("serve", "--shard", "0", "--bind", f"0.0.0.0:{port}", "--advertise", "localhost"),
            "--insecure",
            *where,
        )
        assert "why=--insecure" in shard.wait_for(r"INSECURE: .*\n")[0]
        assert cli.main(["status", *where]) == 0
        assert "\nINSECURE: plaintext" in capsys.readouterr().out
        hand.start("worker", "worker", "run", *where)
        assert codes(hand.processes) == [0, 0, 0], hand.logs()
        assert f"localhost:{port}" in coordinator.text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An epoch of the plain job; tests that continue it take a copy."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    return up(DENSE, run_dir, "--mode", "sync", "--shards", "2", "--set", "epochs=1")


def test_a_resumed_job_ends_where_an_uninterrupted_one_does(trained: Run, tmp_path: Path) -> None:
    """Sync, numpy engine, momentum in the checkpoint, and another number of shards after it."""
    assert trained.checkpoint.name == "step-00000021"
    shutil.copytree(trained.run_dir, tmp_path / "run")
    args = ("--mode", "sync", "--shards", "3", "--set", "epochs=3", "--resume")
    resumed = up(DENSE, tmp_path / "run", *args)
    assert resumed.summary["global_step"] == 63
    assert resumed.summary["generation"] == trained.summary["generation"] + 1
    expected = plain_loop(DENSE, tmp_path / "loop.npz", "epochs=3")
    found = load_variables(resumed.checkpoint)
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_resuming_with_another_batch_size_is_refused(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.run_dir, tmp_path / "run")
    args = ("--mode", "sync", "--shards", "2", "--set", "batch_size=30", "--resume")
    run = up(DENSE, tmp_path / "run", *args, check=False)
    assert run.code == 2
    assert "batch_size" in run.stderr
    assert "20" in run.stderr
    assert "30" in run.stderr


@pytest.fixture(scope="module")
def exports(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was trained, in every format."""
    folder = tmp_path_factory.mktemp("exports")
    for name in ("model.keras", "model.weights.h5", "saved"):
        done = ended("coordinator", "export", trained.run_dir, "--to", folder / name)
        assert done.returncode == 0, done.stderr
    return folder


def test_exports_load_in_plain_keras(trained: Run, exports: Path) -> None:
    script = exports / "load.py"
    script.write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "model = keras.models.load_model('model.keras')\n"
        "x = np.linspace(-1, 1, 24, dtype='float32').reshape(2, 12)\n"
        "expected = model.predict(x, verbose=0)\n"
        "np.savez('loaded.npz', **{'/'.join(v.path.split('/')[-2:]): v.numpy()\n"
        "                         for v in model.weights})\n"
        "again = keras.Sequential([keras.Input((12,)),\n"
        "    keras.layers.Dense(32, activation='tanh', name='hidden'),\n"
        "    keras.layers.Dense(4, name='logits')])\n"
        "again.load_weights('model.weights.h5')\n"
        "np.testing.assert_allclose(again.predict(x, verbose=0), expected, atol=1e-6)\n"
        "saved = tf.saved_model.load('saved')\n"
        "np.testing.assert_allclose(saved.serve(x), expected, atol=1e-6)\n"
    )
    # From a folder, and on a path, where this project cannot be found.
    plain = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    blocked = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'worker', 'pserver', 'coordinator', 'psrpc'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    script.write_text(blocked + script.read_text())
    subprocess.run(
        [sys.executable, str(script)], check=True, timeout=LIMIT_S, cwd=exports, env=plain
    )
    with np.load(exports / "loaded.npz") as loaded:
        for name, value in load_variables(trained.checkpoint).items():
            within = "/".join(name.split("/")[-2:])
            np.testing.assert_array_equal(loaded[within], value, err_msg=name)


def test_a_job_starts_from_what_another_one_trained(
    trained: Run, exports: Path, tmp_path: Path
) -> None:
    """By way of Keras' own format; tests/worker/export/test_export.py starts from a checkpoint
    too."""
    sets = ("--set", "epochs=1", "--set", f"init_from={exports / 'model.weights.h5'}")
    second = up(DENSE, tmp_path / "second", *sets, "--shards", "2")
    begun = load_variables(second.run_dir / "checkpoints" / "step-00000000")
    for name, value in load_variables(trained.checkpoint).items():
        np.testing.assert_array_equal(begun[name], value, err_msg=name)


def endless(folder: Path, *more: str) -> Process:
    """A cluster with more work than any test waits for."""
    size = ("--workers", "2", "--shards", "2", "--set", "epochs=100000")
    return Process("up", "coordinator", "up", DENSE, "--run-dir", folder / "run", *size, *more)


def listening(pids: Sequence[int]) -> set[int]:
    """The TCP ports on which the processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(str(link.readlink()))
    ports = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def assert_secured(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers have a certificate made for this run, and refuse callers without one."""
    assert cli.main(["status", "--run-dir", str(run_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    servers = {(run_dir / "address").read_text().strip(): Role.COORDINATOR}
    servers |= {shard["address"]: Role.SHARD for shard in status["shards"]}
    assert len(servers) == 3
    assert not status["insecure"]
    security = Security.from_options(Role.OPERATOR, run_dir / "certs")
    for address, role in servers.items():
        assert why_unhealthy(address, "", LIMIT_S, security, role) == ""
    ports = listening(processes_of(run_dir))
    assert ports >= {int(address.rpartition(":")[2]) for address in servers}
    for port in ports:
        with open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                HealthStub(channel).Check(HealthCheckRequest(), timeout=LIMIT_S)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, port


def test_a_cluster_has_certificates_unasked_and_a_killed_supervisor_takes_it_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = endless(tmp_path)
    cluster.wait_for("training  epoch")
    assert_secured(tmp_path / "run", capsys)
    running = processes_of(tmp_path)
    assert len(running) >= 5, "a coordinator, two shards and two workers"
    cluster.kill()
    cluster.wait()
    wait_until_gone(running)
    cluster.end()


def test_a_shard_that_may_not_be_started_again_is_named(tmp_path: Path) -> None:
    cluster = endless(tmp_path, "--max-restarts", "0", "--workers", "1")
    cluster.wait_for("training  epoch")
    (shard,) = (pid for pid in processes_of(tmp_path) if " serve --shard 1 " in command_line(pid))
    os.kill(shard, signal.SIGKILL)
    assert cluster.wait() == 1
    assert "shard-1" in cluster.text().strip().splitlines()[-1] or "shard 1" in cluster.text()
    assert not processes_of(tmp_path)
    cluster.end()
