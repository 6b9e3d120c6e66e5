"""The displays of a running job: pure functions of ``GetJobStatusResponse``.

:func:`render` is for a terminal and redrawn in place; :class:`ProgressLog` is for a pipe or a file,
with a line now and then and one per event.
"""

from __future__ import annotations

import math

from rich.console import Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.core.wording import (
    batches,
    duration,
    figure,
    loss_known,
    reason,
    shard_name,
    state,
    step,
    whence,
)
from coordinator.display.timeline import events_between, goes_on, newest_evaluations
from psrpc.ops.retry import BUILDING, COMPILING
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

WARNINGS_SHOWN = 3

_STATE_STYLES = {"ready": "green", "active": "green", "silent": "red", "missing": "yellow"}


def render(status: GetJobStatusResponse, elapsed_s: float) -> RenderableType:
    """Returns the whole state of a job as one block of a terminal.

    Args:
        status: the coordinator's status; any phase.
        elapsed_s: seconds since the start of the job.
    """
    parts: list[RenderableType] = [_headline(status, elapsed_s)]
    if status.total_steps:
        line = Table.grid()
        line.add_row(ProgressBar(total=status.total_steps, completed=status.global_step, width=60))
        parts.append(line)
        parts.append(Text(_figures(status)))
    if status.restored:
        parts.append(Text(goes_on(status.restored), "dim"))
    parts.append(_members(status))
    parts += [Text(line, "cyan") for line in newest_evaluations(status)]
    if status.insecure:
        parts.append(Text("insecure: anyone who reaches its ports can change this job", "yellow"))
    if status.switching:
        parts.append(Text(_switching(status), "yellow"))
    parts += [Text(f"stuck: {line}", "yellow") for line in status.stuck]
    parts += [Text(f"straggler: {line}", "yellow") for line in status.stragglers]
    if status.waiting_for:
        parts.append(Text(f"waiting for {status.waiting_for}", "yellow"))
    parts += [Text(f"warning: {line}", "yellow") for line in status.warnings[-WARNINGS_SHOWN:]]
    if status.reason:
        words = reason(status)
        parts.append(Text(words, "" if words == status.reason else "bold red"))
    return Group(*parts)


class ProgressLog:
    """Turns a sequence of statuses into lines of text; pure, with time as an argument.

    A line comes at most every ``every_s`` seconds while steps are made, and at once for a new
    phase, the end of an epoch, an evaluation, a warning, a changed shard or worker, and a new
    reason to wait.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last: GetJobStatusResponse | None = None
        self._printed_at = -math.inf
        self._stragglers: set[str] = set()
        self._stuck: set[str] = set()

    def lines(self, status: GetJobStatusResponse, now: float) -> list[str]:
        """Returns the news of ``status``, which follows the status of the previous call.

        Args:
            now: seconds on a clock that never goes back.
        """
        # The first status may hold results of an earlier run; only its restored checkpoint is news.
        first = GetJobStatusResponse(
            evaluations=status.evaluations, newest_checkpoint=status.newest_checkpoint
        )
        last, self._last = self._last or first, GetJobStatusResponse()
        self._last.CopyFrom(status)
        found = [event.text for event in events_between(last, status)]
        found += self._new_stragglers(status)
        found += self._newly_stuck(status)
        step_made = status.global_step != last.global_step
        epoch_known = last.epoch > 0 and status.epoch > 0
        epoch_ended = epoch_known and status.epoch != last.epoch and step_made
        due = now - self._printed_at >= self._every_s
        busy = _busy(status)
        if epoch_ended or (due and (status.phase == "training" or busy)):
            found.append("  ".join([_progress(status), *busy]))
            self._printed_at = now
        return found

    def _newly_stuck(self, status: GetJobStatusResponse) -> list[str]:
        """Returns a line for each new stuck worker or shard, and one when it is over."""
        lines = {line.partition(" (for ")[0]: line for line in status.stuck}
        new = [f"stuck: {line}" for what, line in lines.items() if what not in self._stuck]
        over = [f"no longer stuck: {what}" for what in sorted(self._stuck - lines.keys())]
        self._stuck = set(lines)
        return new + over

    def _new_stragglers(self, status: GetJobStatusResponse) -> list[str]:
        """Returns a line for each new straggler, once: its slowness changes all the time."""
        known = {worker.worker for worker in status.workers}
        self._stragglers &= known
        found = []
        for line in status.stragglers:
            name = line.partition(" ")[0]
            if name not in self._stragglers:
                found.append(f"straggler: {line}")
                self._stragglers.add(name)
        return found


def _headline(status: GetJobStatusResponse, elapsed_s: float) -> Text:
    policy = status.settings or status.mode
    text = Text.assemble((status.job, "bold"), f"  {policy}  ", (status.phase, "bold cyan"))
    if status.epoch and not whence(status):
        text.append(f"  epoch {status.epoch}/{status.epochs}")
    if status.generation > 1:
        text.append(f"  generation {status.generation}")
    text.append(f"  {duration(elapsed_s)}")
    if status.phase == "training" and status.steps_per_s > 0:
        left = status.total_steps - status.global_step
        text.append(f", about {duration(left / status.steps_per_s)} left")
    return text


def _switching(status: GetJobStatusResponse) -> str:
    return f"under way: {status.switching}"


def _figures(status: GetJobStatusResponse) -> str:
    parts = [
        whence(status) or step(status),
        f"loss {figure(status.loss)}" if loss_known(status) else "loss -",
        f"{status.batches_per_s:.1f} {batches(status)}/s",
        f"{status.examples_per_s:.0f} examples/s",
    ]
    if status.mode in ("async", "ssp"):
        parts.append(f"staleness {status.mean_staleness:.2f}")
    for name in ("refused", "skipped", "failed", "too_stale", "speculative", "late"):
        count = getattr(status, name)
        if count:
            parts.append(f"{count} {name.replace('_', ' ')}")
    return "  ".join(parts)


def _progress(status: GetJobStatusResponse) -> str:
    figures = _figures(status) if status.total_steps else f"step {status.global_step}"
    epoch = f"epoch {status.epoch}/{status.epochs}  " if status.epoch else ""
    return f"{status.phase}  {epoch}{figures}"


def _busy(status: GetJobStatusResponse) -> list[str]:
    """Returns the workers that build or compile a model, which may take minutes without a step."""
    return [
        f"{worker.worker} {worker.waiting_for}"
        for worker in status.workers
        if worker.state == "active" and worker.waiting_for.startswith((BUILDING, COMPILING))
    ]


def _members(status: GetJobStatusResponse) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for title in ("", "state", "steps", "size, rate"):
        justify: JustifyMethod = "right" if title in {"steps", "size, rate"} else "left"
        table.add_column(title, justify=justify, no_wrap=True)
    table.add_column("where", no_wrap=True, overflow="ellipsis", max_width=32)
    # A changing number of lines would make the block jump. Takes the remaining width.
    table.add_column("waiting for", no_wrap=True, overflow="ellipsis", ratio=1)
    for shard in status.shards:
        size = f"{shard.nbytes / 1e6:.1f} MB"
        table.add_row(
            shard_name(shard),
            _state(shard),
            str(shard.version),
            size,
            f"{shard.worker} {shard.address}".strip(),
            shard.waiting_for,
        )
    for worker in status.workers:
        table.add_row(
            worker.worker,
            _state(worker),
            str(worker.batches),
            f"{worker.batches_per_s:.1f}/s",
            f"{worker.host} pid {worker.pid} ({worker.device})",
            worker.waiting_for,
        )
    return table


def _state(member: ShardStatus | WorkerStatus) -> Text:
    return Text(state(member), _STATE_STYLES.get(member.state, ""))
