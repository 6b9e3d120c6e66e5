"""A worker that sleeps where others compute: so that two cores show what four machines do.

    python -m benchmarks.sleeping_worker --coordinator HOST:PORT --example-s 0.005 --slow-down 5

Coordinator, shards, leases and every RPC are the project's own, and so is all of the worker but
its gradients: those are zeros, after a sleep of ``--example-s`` for each example. With ``--count``
one process is so many workers, each with threads and connections of its own.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from coordinator.client.client import CoordinatorClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient, plain
from psrpc.core.errors import JobFailed, PsError
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.ops.exit_status import after_signal
from psrpc.ops.logs import configure, get_logger
from psrpc.ops.process import die_with_parent, incarnation, on_stop_signals
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array
from worker.loop.performer import Performer
from worker.loop.session import WorkerSession
from worker.protocol.done import Stopped
from worker.step.gradient_source import OneAtOnce, PullSnapshot, WithoutTables

log = get_logger()


@dataclass(frozen=True)
class SleptResult:
    """See ``worker.step.gradient_source.GradientResult``."""

    gradients: tuple[Gradient, ...]
    loss: float = 1.0
    finite: bool = True
    rows: tuple[Mapping[int, Rows], ...] = ()
    metrics: tuple[float, ...] = ()


class SleepingSource(WithoutTables, OneAtOnce):
    """A ``worker.step.gradient_source.GradientSource`` whose gradients are zeros and take time."""

    wire: Encoding = "plain"

    def __init__(self, example_s: float) -> None:
        """``example_s``: seconds that one example takes."""
        self._example_s = example_s
        self._plan: Plan | None = None
        self._current: Mapping[str, Array] = {}
        self._result = SleptResult(())
        self.spare: Mapping[str, Array] = {}

    def build(self) -> None:
        """There is nothing to build."""

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        """See the protocol; so are the others."""
        self._plan = plan
        self._current, self.spare = workspace.sets
        self._result = SleptResult(
            tuple(
                {
                    arena.name: plain(np.zeros(arena.shard_length(shard), arena.dtype))
                    for arena in plan.arenas
                }
                for shard in range(plan.shards)
            )
        )

    def leave(self) -> None:
        self._current = self.spare = {}

    def initial_values(self, _first_rows: str = "", /) -> Mapping[str, Array]:
        assert self._plan is not None  # prepare has set it
        return {arena.name: np.zeros(arena.length, arena.dtype) for arena in self._plan.arenas}

    def expect(self, batches: Iterable[BatchId]) -> None:
        pass

    def forget(self) -> None:
        pass

    def waiting(self, now: bool, /) -> None:
        pass

    def read(self, batch: BatchId) -> int:
        return batch.count

    def gradient(
        self,
        batch: BatchId,  # noqa: ARG002
        given: int,
        _rows: object = None,
    ) -> SleptResult:
        time.sleep(given * self._example_s)
        return self._result

    def swap(self, version: int = 0) -> None:  # noqa: ARG002
        self._current, self.spare = self.spare, self._current

    def settle(self, unused: Iterable[int] = (), _batch: BatchId | None = None) -> None:
        pass

    def not_finite(self, _batch: BatchId) -> str:
        return ""

    def take_back(self, _batch: BatchId | None = None) -> None:
        pass

    def evaluate(
        self,
        task: pb.EvaluateTask,  # noqa: ARG002  # of the protocol
        generation: int,  # noqa: ARG002
        pull: PullSnapshot,  # noqa: ARG002
    ) -> pb.EvaluateDone:
        raise AssertionError("there is nothing to evaluate")

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:  # noqa: ARG002
        raise AssertionError("there is nothing to merge")


def main(arguments: Sequence[str] | None = None) -> int:
    """Does the work of ``worker run``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sleeping_worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--example-s", type=float, required=True, metavar="S")
    parser.add_argument("--slow-down", type=float, default=1.0, metavar="X", help="times as long")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="workers of this process")
    asked = parser.parse_args(arguments)
    die_with_parent()
    configure("console", "worker")
    with ExitStack() as stack:
        sessions = []
        for _ in range(asked.count):
            client = stack.enter_context(CoordinatorClient(asked.coordinator))
            session = WorkerSession(client, incarnation(), connect_timeout_s=120.0)
            sessions.append(stack.enter_context(session))

        def stop(number: int) -> None:
            for session in sessions:
                session.stop(after_signal(number))

        on_stop_signals(stop)
        example_s = asked.example_s * asked.slow_down
        ended: list[int] = []
        threads = [
            threading.Thread(target=lambda session=session: ended.append(_work(session, example_s)))
            for session in sessions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return max(ended, default=1) if len(ended) == asked.count else 1


def _work(session: WorkerSession, example_s: float) -> int:
    """Trains until the job ends; returns the exit status."""
    try:
        sha256 = session.get_job().job_sha256
        with Performer(SleepingSource(example_s), session, sha256, "cpu") as performer:
            performer.run()
    except Stopped as stopped:
        log.info("leaving", why=str(stopped))
        return 0
    except JobFailed as error:
        sys.stderr.write(f"error: job failed: {error}\n")
    except PsError as error:
        sys.stderr.write(f"error: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
