"""A worker whose gradients need no TensorFlow; everything else is the worker's own code."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from coordinator.client.client import CoordinatorClient
from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import plain
from psrpc.core.errors import JobFailed, PsError
from psrpc.core.plan import Plan
from psrpc.ops.exit_status import after_signal
from psrpc.ops.logs import configure, get_logger
from psrpc.ops.process import die_with_parent, incarnation, on_stop_signals
from psrpc.options.settings import WorkerOptions
from psrpc.security.credentials import Security
from tests.chaos.row_witness import check_rows, every_row, row_gradients, shard_rows
from tests.chaos.schedule import GATE
from tests.chaos.witness import (
    PAIRS,
    WITNESS,
    Array,
    Options,
    Torn,
    check_values,
    description,
    gradient,
    initial_values,
)
from tests.worker.fakes import FakeResult, FakeSource
from worker.embedding.row_sets import ReceivedRows, RowSets, rows_nbytes
from worker.loop.performer import Performer
from worker.loop.session import WorkerSession
from worker.process.hosting import SliceHosting
from worker.protocol.done import Stopped

log = get_logger()

EXIT_TORN = 70
"""The exit status of a worker that saw what no shard may ever show."""

GATE_S = 0.01

READ_LATE = 3
"""Of so many batches one is read too late for its rows to come with another exchange."""


class WitnessSource(FakeSource):
    """The witness model. Looks at all that it receives; the last batches wait until the gate is
    open."""

    def __init__(self, options: Options, gate: Path, standing: WorkerSession) -> None:
        self._options = options
        self._gate = gate
        self._standing = standing
        self._needed = every_row(options)
        self._row_sets: RowSets | None = None

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        """See GradientSource, as for all methods here."""
        assert plan == self._options.plan
        super().prepare(plan, workspace)
        self._row_sets = RowSets(plan.tables, workspace.row_sets) if plan.tables else None

    def leave(self) -> None:
        super().leave()
        self._row_sets = None

    def rows_nbytes(self, plan: Plan, /) -> int:
        return rows_nbytes(plan.tables, self._needed)

    def initial_values(self, _first_rows: str = "", /) -> Mapping[str, Array]:
        return initial_values(self._options)

    def read(self, batch: BatchId) -> int:
        return self._options.number(batch)

    def ahead(self, batch: BatchId, /) -> int | None:
        number = self._options.number(batch)
        return number if number % READ_LATE else None

    def place(self, _given: int, /) -> ReceivedRows | None:
        return self._row_sets.place(self._needed) if self._row_sets else None

    @property
    def at_once(self) -> int:
        return self._options.devices

    @property
    def sums(self) -> bool:
        return self._options.sums

    @property
    def exact(self) -> bool:
        return self._options.exact

    def gradients(
        self, batches: Sequence[BatchId], given: Sequence[int], /
    ) -> Sequence[FakeResult]:
        assert len(batches) <= self.at_once
        self._wait(max(given))
        return [self._result(one, None) for one in given]

    def gradient(self, _batch: BatchId, given: int, received: ReceivedRows | None, /) -> FakeResult:
        self._wait(given)
        return self._result(given, received)

    def _wait(self, given: int) -> None:
        options = self._options
        time.sleep(options.pace_ms / 1000)
        while given >= GATE * options.total_batches and not self._gate.exists():
            self._standing.check()
            time.sleep(GATE_S)

    def _result(self, given: int, received: ReceivedRows | None) -> FakeResult:
        options = self._options
        self._check(given // options.policy.taken if options.fixed else None)
        if received is not None:
            self._check_rows(received)
        pieces = self._current[WITNESS].reshape(options.shards, options.piece)
        found = [gradient(options, given, shard, piece) for shard, piece in enumerate(pieces)]
        parts = [one for one in found if one is not None]
        if parts:
            # Beside slices, shards have rows alone.
            nothing = {name: array[:0] for name, array in parts[0].items()}
            parts = [nothing] * options.slices + parts
        gradients = tuple({name: plain(a) for name, a in part.items()} for part in parts)
        rows = tuple(
            row_gradients(options, given, shard) if options.rows and shard < options.shards else {}
            for shard in range(len(gradients))
        )
        return FakeResult(gradients, float(given), bool(gradients), rows)

    def swap(self, version: int) -> None:
        super().swap(version)
        self._check(None)

    def _check(self, round_number: int | None) -> None:
        try:
            check_values(self._options, self._current, round_number)
        except Torn as torn:
            self._say_and_die(torn)

    def _check_rows(self, received: ReceivedRows) -> None:
        options = self._options
        witness = self._current[WITNESS].reshape(options.shards, options.piece)
        updates = self._current[PAIRS].reshape(options.shards, -1)[:, 0]
        try:
            for shard in range(options.shards):
                rows = shard_rows(options.plan, received.values, received.needed, shard)
                batches = check_rows(options, rows)
                # In async mode rows that came by themselves may be newer than the arenas.
                same = options.optimizer == "sgd" and batches == updates[shard]
                if options.fixed or same:
                    check_rows(options, rows, witness[shard, : options.total_batches] != 0)
        except Torn as torn:
            self._say_and_die(torn)

    def _say_and_die(self, torn: Torn) -> NoReturn:
        where = self._standing.membership
        sys.stderr.write(f"torn, in generation {where.generation}: {torn}\n")
        sys.stderr.flush()
        os._exit(EXIT_TORN)


def run(arguments: Sequence[str]) -> int:
    """Does the work of ``worker run``, with the witness model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("run",))
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    parser.add_argument("--die-with-parent", action="store_true")
    parser.add_argument("--no-shm", dest="shm", action="store_false")
    parser.add_argument("--insecure", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.die_with_parent:
        die_with_parent()
    configure(asked.log_format, "worker")
    options = Options.from_json(os.environ["CHAOS_OPTIONS"])
    own, where = incarnation(), WorkerOptions(coordinator=asked.coordinator)
    with (
        CoordinatorClient(asked.coordinator, Security(insecure=asked.insecure)) as client,
        WorkerSession(client, own, connect_timeout_s=120.0) as standing,
        SliceHosting(standing, where, own) as hosting,
    ):

        def stop(number: int) -> None:
            hosting.leave()
            standing.stop(after_signal(number))

        on_stop_signals(stop)
        connect: Callable[..., ShardClient] = ShardClient
        if options.hosted:
            hosting.offer()
            connect = hosting.connect
        source = WitnessSource(options, Path(os.environ["CHAOS_GATE"]), standing)
        try:
            standing.get_job()
            sha256 = description(options)["job_sha256"]
            with Performer(
                source, standing, sha256, "cpu", shm=asked.shm, connect=connect
            ) as performer:
                performer.run()
        except Stopped as stopped:
            log.info("leaving", why=str(stopped))
            return stopped.status
        except JobFailed as error:
            sys.stderr.write(f"error: job failed: {error}\n")
        except PsError as error:
            sys.stderr.write(f"error: {error}\n")
    return 1
