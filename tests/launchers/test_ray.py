"""Clusters in a real Ray: a placement group, and an actor around each process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.launchers import ray as launcher
from coordinator.launchers.ray_driver import RayDriver, RayTask
from coordinator.launchers.ray_plan import RayOptions
from pserver import launch
from psrpc.core.errors import JobFailed, LaunchFailed, PsError
from tests.docs.following import follow_page
from tests.docs.host import Shell
from tests.e2e.cluster import (
    EXAMPLES,
    LIMIT_S,
    command,
    environment,
    members,
    processes_of,
    until,
    wait_until_gone,
)
from tests.launchers.test_slurm import counted, epochs

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(900)]

JOB = EXAMPLES / "mnist_dnn.py"
CPUS = 8


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """A Ray of one node; yields its address."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # As on nodes of its own: by default, its processes give way to all others here.
        patch.setenv("RAY_worker_niceness", "0")
        here = ray.init(
            "local",
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield here.address_info["gcs_address"]
        ray.shutdown()


def parent(pid: int) -> int:
    """Returns the process that started another one: for ours, the actor's."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"(?m)^PPid:\s+(\d+)", status)
    assert found
    return int(found[1])


def test_killed_actors_cost_no_batch(tmp_path: Path, engine: str) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            launch.ray,
            JOB,
            run_dir=run,
            shards=2,
            workers=2,
            insecure=True,
            overrides=["epochs=6", "mode=sync"],
        )

        def kill_actor(role: str) -> None:
            until(lambda: future.done() or bool(members(run, role)), f"a {role}")
            before = epochs(run)
            [*_, pid] = members(run, role)
            os.kill(parent(pid), signal.SIGKILL)
            wait_until_gone([pid])
            until(lambda: future.done() or epochs(run) > before, "another epoch")
            assert not future.done()

        until(lambda: future.done() or epochs(run) > 0, "the first epoch")
        for role in ("worker", "pserver", "coordinator"):
            kill_actor(role)
        result = future.result(LIMIT_S)
    found = counted(run)
    assert found["batches"] == 7200
    assert result.exit_status == 0
    assert result.steps > 0
    assert sum(result.restarts.values()) == 3, result.restarts
    assert result.restarts["coordinator"] == 1
    until(lambda: not processes_of(run), "all processes to be gone")


@pytest.mark.long
def test_the_page_leads_to_a_trained_model(tmp_path: Path, engine: str) -> None:
    """It kills a process, whose actor stays."""
    with Shell(tmp_path, {**os.environ, "RAY_ADDRESS": engine}) as host:
        done = follow_page("docs/ray.md", host)
        for run, batches in (("first", 11_880), ("second", 990)):
            assert counted(host.folder / "runs" / run)["batches"] == batches
        assert any("started again" in each.output for each in done if "launch ray" in each.command)
        until(lambda: not processes_of(host.folder), "all processes to be gone")


@pytest.mark.long
def test_ctrl_c_drains_and_the_same_command_goes_on(tmp_path: Path, engine: str) -> None:
    run = tmp_path / "run"
    words: list[str | Path] = [
        "launch",
        "ray",
        JOB,
        "--address",
        engine,
        "--run-dir",
        run,
        "--insecure",
    ]
    words += ["--set", "epochs=4"]
    with subprocess.Popen(
        command("coordinator", *words), stderr=subprocess.PIPE, text=True, env=environment()
    ) as first:
        until(lambda: first.poll() is not None or epochs(run) > 0, "the first epoch")
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 130, said
    assert "draining" in said
    assert "Traceback" not in said
    assert list((run / "checkpoints").glob("step-*"))
    assert not (run / "summary.json").exists()
    again = subprocess.run(
        command("coordinator", *words),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    assert again.returncode == 0, again.stderr
    assert counted(run)["batches"] == 4800
    assert f"{run} is done, " in again.stdout


def drive(folder: Path, tasks: dict[str, RayTask], far: str = "") -> RayDriver:
    """Runs tasks in actors to the end of the coordinator; the one called ``far`` on a far node."""
    bundles = {name: {"CPU": 1.0, "far": 1.0} if name == far else {"CPU": 1.0} for name in tasks}
    with launcher.placed(bundles, RayOptions()) as actors:
        driver = RayDriver(tasks, actors, folder, 1, {}, max_restarts=10, place_s=60)
        driver.run()
    return driver


def ending(status: int | str, words: str = "") -> RayTask:
    return RayTask("tests.launchers.endings", (str(status), words))


@pytest.mark.parametrize(
    ("shard", "said", "lives", "code"),
    [
        (
            ending(2, "error PS102: no file"),
            r"shard-0 ended with .*shard-0.log: no file",
            1,
            "PS102",
        ),
        (ending(1, "it broke"), r"it broke; .*a crash loop, it ended 3 times in a row", 3, None),
    ],
)
def test_a_process_that_cannot_run_ends_the_launch(
    tmp_path: Path, engine: str, shard: RayTask, said: str, lives: int, code: str | None
) -> None:
    with pytest.raises(JobFailed, match=said) as raised:
        drive(tmp_path, {"coordinator": ending("stay"), "shard-0": shard})
    assert raised.value.code == (code or JobFailed.code)
    log = (tmp_path / "logs" / "shard-0.log").read_text()
    assert len(log.splitlines()) == lives


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": 9}, r"11 processes need 11 CPU, and Ray has 8 CPU on 1 node; ask for fewer"),
        ({"resources": {"worker": {"GPU": 1}}}, r"need 2 CPU, 1 GPU, and Ray has 0 GPU on 1 node"),
        ({"strategy": "STRICT_SPREAD"}, r"STRICT_SPREAD needs a node for each of 3 processes"),
        ({"address": "127.0.0.1:1"}, r"connected to Ray already; leave out address"),
    ],
)
def test_ray_without_room_is_said_before_anything_starts(
    tmp_path: Path, engine: str, more: dict[str, Any], said: str
) -> None:
    run = tmp_path / "run"
    with pytest.raises(PsError, match=said):
        launch.ray(JOB, run_dir=run, insecure=True, **more)
    assert not run.exists()


def test_places_that_others_hold_are_not_awaited_for_ever(tmp_path: Path, engine: str) -> None:
    with (
        launcher.placed({"coordinator": {"CPU": CPUS - 1}}, RayOptions()),
        pytest.raises(LaunchFailed, match=r"has not reserved 3 CPU in 0.2 s; .*1 CPU"),
    ):
        launch.ray(JOB, run_dir=tmp_path / "run", insecure=True, place_s=0.2)


def test_a_refused_job_is_not_started_again(tmp_path: Path, engine: str) -> None:
    with pytest.raises(JobFailed, match=r"exit status 2.* epochs is -1 .*; expected") as raised:
        launch.ray(JOB, run_dir=tmp_path / "run", insecure=True, overrides=["epochs=-1"])
    assert raised.value.code == "PS105"


@contextmanager
def far_node(engine: str, host: str, hides: Path | None = None) -> Iterator[subprocess.Popen[Any]]:
    """Adds a node with the resource ``far``, which may not see a folder of this one."""
    start = [*map(str, (sys.executable, "-m", "ray.scripts.scripts", "start", "--block"))]
    start += [f"--address={engine}", f"--node-ip-address={host}", "--num-cpus=1"]
    start += ['--resources={"far":1}', f"--object-store-memory={100 * 2**20}"]
    mount = f"mount -t tmpfs none {hides} && " if hides else ""
    line = ["unshare", "--mount", "sh", "-c", f'{mount}exec "$@"', "sh", *start]
    node = subprocess.Popen(line, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: host in alive(), "the node")
        yield node
    finally:
        node.terminate()
        node.wait(LIMIT_S)
        until(lambda: host not in alive(), "the node to leave")


def alive() -> list[str]:
    """Returns the addresses of the nodes."""
    import ray

    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def test_a_node_that_does_not_see_the_run_directory_says_so(tmp_path: Path, engine: str) -> None:
    run = tmp_path / "run"
    far = {"worker": {"CPU": 1, "far": 1}}
    with (
        far_node(engine, "127.0.0.2", hides=tmp_path),
        pytest.raises(LaunchFailed, match=r"^node 127.0.0.2 does not see run directory") as raised,
    ):
        launch.ray(JOB, run_dir=run, insecure=True, resources=far)
    assert raised.value.code == "PS141"
    assert not list(run.iterdir())


@pytest.mark.long
def test_a_coordinator_that_moves_to_another_node_is_found(tmp_path: Path, engine: str) -> None:
    tasks = {"coordinator": ending("stay"), "shard-0": ending("stay"), "worker-a": ending("stay")}
    logs = {name: tmp_path / "logs" / f"{name}.log" for name in tasks}

    def begun(name: str, address: str) -> bool:
        return logs[name].exists() and address in logs[name].read_text()

    with ThreadPoolExecutor(1) as pool:
        with far_node(engine, "127.0.0.2") as node:
            driver = pool.submit(drive, tmp_path, tasks, far="coordinator")
            until(lambda: driver.done() or begun("worker-a", "127.0.0.2:1"), "the start")
            os.killpg(node.pid, signal.SIGKILL)
        with far_node(engine, "127.0.0.3"):
            for name in tasks:
                until(lambda n=name: driver.done() or begun(n, "127.0.0.3:1"), "a new address")  # type: ignore[misc]
            # An actor that is asked to leave drains its process before it goes.
            [pid] = processes_of(logs["shard-0"])
            os.kill(parent(pid), signal.SIGTERM)
            until(lambda: driver.done() or len(lines(logs["shard-0"])) == 5, "another start")
            [pid] = processes_of(logs["coordinator"])
            os.kill(pid, signal.SIGUSR1)
            restarts = driver.result(LIMIT_S).restarts
    assert restarts == {"coordinator": 1, "shard-0": 1}
    began = [line.partition(" ")[0] for line in lines(logs["shard-0"])]
    assert began == ["began", "drained", "began", "drained", "began", "drained"]


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines()
