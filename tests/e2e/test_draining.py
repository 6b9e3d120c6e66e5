"""A node that is drained, by a supervisor that has one command line for each process."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, Gate, Hand, Process, by_hand, codes

pytestmark = pytest.mark.slow


def commands(hand: Hand, job: Path, gate: Gate) -> dict[str, Callable[[], Process]]:
    """How each process is started, the first time and every other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    where = ("--coordinator", address)
    auto = ("--resume", "auto", "--set", "epochs=3")
    return {
        "coordinator": lambda: hand.coordinator(job, *auto, bind=address),
        "shard": lambda: hand.start("shard", "pserver", "serve", "--shard", "0", *where),
        "worker": lambda: hand.start(
            "worker", "worker", "run", "--gpu", "none", *where, **gate.environment
        ),
    }


def told(everybody: Sequence[Process]) -> list[int]:
    """The exit codes of all, of which a coordinator without a run is ended once the shard and the
    worker have left: it would stay for others that ask."""
    others = codes(everybody[1:])
    everybody[0].kill(signal.SIGTERM)
    return [everybody[0].wait(), *others]


def test_drained_processes_go_on_with_the_same_commands_until_the_job_is_done(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        hand = stack.enter_context(by_hand(tmp_path))
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=1)))
        start = commands(hand, JOBS / "gated.py", gate)
        everybody = [start[name]() for name in start]
        everybody[2].wait_for("waiting for the training data")
        # The coordinator alone: the others keep what they hold.
        everybody[0].kill(signal.SIGTERM)
        assert everybody[0].wait() == 75, everybody[0].text()
        everybody[0].wait_for("drained .*step-")
        everybody[1].wait_for("waiting for the coordinator at .*, for 120 s at most")
        everybody[2].wait_for("the coordinator does not answer heartbeats")
        everybody[0] = start["coordinator"]()
        everybody[1].wait_for("registered again")
        everybody[2].wait_for("the coordinator answers heartbeats again")
        everybody[0].wait_for("phase .*training")
        # All of them, as a node is drained.
        for process in everybody:
            process.kill(signal.SIGTERM)
        assert codes(everybody) == [75, 75, 75], hand.logs()
        assert not (hand.run_dir / "summary.json").exists()
        gate.open()
        # To the end, and once more.
        for said, wait in (("over .*phase=done", codes), ("nothing is left to do", told)):
            everybody = [start[name]() for name in start]
            assert wait(everybody) == [0, 0, 0], hand.logs()
            everybody[0].wait_for(said)


def test_a_refusal_is_heard_by_all(tmp_path: Path) -> None:
    """No process waits for a coordinator that has refused, and none loads TensorFlow before."""
    with ExitStack() as stack:
        hand = stack.enter_context(by_hand(tmp_path))
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=0)))
        start = commands(hand, tmp_path / "none.py", gate)
        everybody = [start[name]() for name in start]
        assert told(everybody) == [2, 2, 2], hand.logs()
        for process in everybody[1:]:
            process.wait_for(r"error PS\d+: the coordinator refuses to start: .*none\.py")
        assert not hand.run_dir.exists()
