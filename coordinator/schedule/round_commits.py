"""Commits the attempts of rounds: decides which count, and measures speeds by them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.core.work import Report
from coordinator.schedule.decided_ahead import DecidedAhead
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.open_round import OpenRound
from coordinator.schedule.speculation import SlowAttempts
from psrpc.core.errors import InvalidArgument


class RoundCommits:
    """Takes commits of the open round, and of those that are decided ahead. Not thread-safe.

    Attributes:
        examples: number of records that took part in training.
    """

    def __init__(
        self,
        opened: OpenRound,
        ahead: DecidedAhead,
        slow: SlowAttempts,
        tally: Tally,
        examples: int,
        *,
        backups: bool,
    ) -> None:
        """``backups`` says whether an attempt may count in a later round."""
        self.examples = examples
        self._open = opened
        self._ahead = ahead
        self._slow = slow
        self._tally = tally
        self._backups = backups

    def commit(
        self, worker: str, round_number: int, report: Report, number: int, now: float
    ) -> Report | None:
        """See :meth:`coordinator.schedule.rounds.Rounds.commit`; round ``number`` is open."""
        micro = self._open.find(report.batch)
        passed = round_number < number
        if passed and (micro is None or not self._backups):
            return None
        if micro is not None and report.attempt in micro.superseded:
            return None
        if micro is None or round_number > number or self._ahead.opened is not None:
            raise InvalidArgument(
                f"commit of {report.batch} in round {round_number} by {worker}: no such attempt "
                f"was handed out; the open round is {number}"
            )
        held = micro.held(report.attempt, worker)
        if micro.committed is None or micro.committed.attempt != report.attempt:
            self._slow.speeds.measure(held.worker, report.batch.count, now - held.since)
            if self._ahead.crew.devices(worker) == 1:
                # The worker begins its other micro-batches only now.
                self._open.begin_again(worker, now)
        if micro.committed is not None:
            if micro.committed.attempt != report.attempt:
                # The attempt came second, and its worker is done with it.
                del micro.attempts[report.attempt]
                micro.superseded.add(report.attempt)
            return None
        # The newest version at the time of the lease, or a newer one that the worker reports.
        micro.base = max(held.round, round_number)
        micro.committed = replace(report, staleness=number - micro.base)
        self._open.commit(micro)
        self._count(worker, micro.committed)
        self._tally.superseded += len(micro.attempts) - 1
        self._tally.late += held.round < number
        return micro.committed

    def report(self, worker: str, reports: Sequence[Report]) -> list[Report]:
        """Commits attempts of rounds that are decided ahead; returns the reports that count."""
        counted = []
        for report in reports:
            micro = self._ahead.commit(worker, report)
            if micro is None or micro.committed is None:
                continue
            if micro in self._open.micros:
                self._open.commit(micro)
            self._count(worker, micro.committed)
            counted.append(micro.committed)
        return counted

    def _count(self, worker: str, report: Report) -> None:
        self.examples += 0 if report.skipped else report.batch.count
        self._ahead.crew.worked(worker)
