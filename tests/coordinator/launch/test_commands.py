from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from coordinator.launch.commands import UpOptions, cluster, letters, resume_command
from psrpc.ops.process import PARENT_PID

ALL = UpOptions(
    job="job.py",
    shards=2,
    workers=3,
    run_dir=Path("runs/x"),
    mode="sync",
    replicas=4,
    resume=True,
    attended=True,
    overrides=("epochs=3", "optimizer.learning_rate=0.1"),
    log_format="json",
    connect_timeout_s=7.5,
    intra_op_threads=2,
    gpu="1",
    gpu_memory_fraction=0.25,
    shm=False,
    data_connections="off",
    step_times=True,
)


def line(arguments: object) -> str:
    assert isinstance(arguments, list)
    assert arguments[:3] == [sys.executable, "-P", "-m"]
    return " ".join(arguments[3:])


def test_every_option_reaches_its_process() -> None:
    processes = cluster(ALL, {}, cores=8, address="127.0.0.1:9")
    assert processes.address == "127.0.0.1:9"
    assert line(processes.coordinator.arguments) == (
        "coordinator.cli serve --job job.py --shards 2 --run-dir runs/x --bind 127.0.0.1:9 "
        "--workers 3 --resume --attended --mode sync --replicas 4 --set epochs=3 "
        "--set optimizer.learning_rate=0.1 --log-format json --die-with-parent"
    )
    members = processes.members
    assert list(members) == ["shard-0", "shard-1", "worker-a", "worker-b", "worker-c"]
    every = "--coordinator 127.0.0.1:9 --connect-timeout 7.5 --log-format json --die-with-parent"
    assert line(members["shard-1"].arguments) == (
        f"pserver.cli serve --shard 1 --bind 127.0.0.1:0 --data-connections off {every}"
    )
    assert line(members["worker-c"].arguments) == (
        "worker.cli run --job job.py --gpu 1 --gpu-memory-fraction 0.25 --intra-op-threads 2 "
        f"--no-shm --step-times runs/x/steps/worker-c.csv {every}"
    )


def test_a_run_that_may_have_begun_is_begun_or_resumed() -> None:
    options = replace(ALL, resume=False, attended=False, goes_on=True)
    said = line(cluster(options, {}, cores=8, address="a:1").coordinator.arguments)
    assert " --resume auto --starts-again --mode sync " in said


def test_the_last_worker_is_the_slow_one() -> None:
    members = cluster(replace(ALL, slow_down=5.0), {}, cores=8, address="a:1").members
    assert "--slow-down 5 " in line(members["worker-c"].arguments)
    for name in ("worker-a", "worker-b"):
        assert "--slow-down" not in line(members[name].arguments)


def test_spans_of_all_processes_go_to_one_place() -> None:
    processes = cluster(replace(ALL, trace="http://a/v1/traces"), {}, cores=8, address="a:1")
    for command in (processes.coordinator, *processes.members.values()):
        assert " --trace http://a/v1/traces" in line(command.arguments)


def test_options_not_given_are_left_to_the_job() -> None:
    options = UpOptions(job="job.py", shards=1, workers=1, run_dir=Path("r"))
    processes = cluster(options, {}, cores=1, address="a:1")
    assert line(processes.coordinator.arguments) == (
        "coordinator.cli serve --job job.py --shards 1 --run-dir r --bind a:1 --workers 1 "
        "--starts-again --log-format console --die-with-parent"
    )
    assert line(processes.members["worker-a"].arguments) == (
        "worker.cli run --job job.py --gpu auto --coordinator a:1 --connect-timeout 120 "
        "--log-format console --die-with-parent"
    )


def test_workers_share_the_cores() -> None:
    for cores, share in ((8, "2"), (2, "1")):
        members = cluster(ALL, {}, cores, "a:1").members
        assert members["worker-a"].environment["TF_NUM_INTRAOP_THREADS"] == share
        assert "TF_NUM_INTRAOP_THREADS" not in members["shard-0"].environment


def test_the_environment_is_passed_on() -> None:
    environment = {"HOME": "/h", "MALLOC_TOP_PAD_": "1"}
    member = cluster(ALL, environment, 8, "a:1").members["shard-0"]
    assert member.environment["HOME"] == "/h"
    assert member.environment["MALLOC_TOP_PAD_"] == "1"
    assert member.environment[PARENT_PID] == str(os.getpid())


def test_the_command_that_continues_a_run() -> None:
    assert resume_command(replace(ALL, job="my job.py", overrides=())) == (
        "coordinator up 'my job.py' --resume --run-dir runs/x --shards 2 --workers 3 "
        "--mode sync --replicas 4"
    )
    plain = UpOptions(job="job.py", shards=1, workers=1, run_dir=Path("r"))
    assert resume_command(plain) == (
        "coordinator up job.py --resume --run-dir r --shards 1 --workers 1"
    )


def test_letters_do_not_run_out() -> None:
    assert [letters(n) for n in (0, 1, 25, 26, 27, 701, 702)] == [
        *("a", "b", "z", "aa", "ab", "zz", "aaa")
    ]
