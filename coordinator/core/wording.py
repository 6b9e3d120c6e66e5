"""Formats figures and names for people. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

MISSED_S = 3.0
"""Silence that is shown although the lease has not lapsed: two missed heartbeats."""


def duration(seconds: float) -> str:
    """Formats a duration: ``"4.2 s"``, ``"1:05"`` or ``"2:01:05"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def figure(value: float) -> str:
    """Returns a loss or a metric with four decimals; a smaller one with three digits."""
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def metrics(results: Mapping[str, float]) -> str:
    """Formats results: ``"loss 0.1234, accuracy 0.9700"``, the loss first, the others sorted by
    name."""
    names = sorted(results, key=lambda name: (name != "loss", name))
    return ", ".join(f"{name} {figure(results[name])}" for name in names)


def not_evaluated(epochs: int, newest: int, why: str) -> str:
    """Returns the warning that ``epochs`` epochs, up to ``newest`` (from 1), have no evaluation.
    ``why``, a colon and the reason, is appended."""
    which = f"epoch {newest} is" if epochs == 1 else f"{epochs} epochs (the newest is {newest}) are"
    return f"{which} not evaluated{why}"


_COUNT = re.compile(r"^(epoch \d+ is|\d+ epochs \(the newest is \d+\) are)(?= not evaluated)")


def without_count(warning: str) -> str:
    """Returns the part of a warning that stays the same while the count in :func:`not_evaluated`
    rises."""
    return _COUNT.sub("", warning)


def checkpoint(name: str) -> str:
    """Formats a checkpoint: ``"checkpoint step-00000500.g2 (step 500)"``."""
    at = step_of(name)
    return f"checkpoint {name}" + ("" if at is None else f" (step {at})")


def step_of(name: str) -> int | None:
    """Returns the global step in a checkpoint's name or path, or None."""
    found = re.match(r"step-(\d+)", name.rpartition("/")[2])
    return int(found[1]) if found else None


def whence(status: GetJobStatusResponse) -> str:
    """Says which checkpoint the job goes on from, until the step is known; empty from then on."""
    if status.phase != "recovering":
        return ""
    if status.restored:
        return f"restoring from {status.restored}"
        # Shards that are still present may hold more.
    newest = status.newest_checkpoint.rpartition("/")[2]
    return f"going on from {newest} or later" if newest and not status.global_step else ""


def step(status: GetJobStatusResponse) -> str:
    """Formats progress: ``"step 300/1200 (25 %)"``; requires a total."""
    percent = 100 * status.global_step / status.total_steps
    return f"step {status.global_step}/{status.total_steps} ({percent:.0f} %)"


def reason(status: GetJobStatusResponse) -> str:
    """Formats the reason of an end: ``"failed: ..."`` unless the run is done or goes on."""
    ended_well = status.phase in ("done", "restarting")
    return status.reason if ended_well else f"failed: {status.reason}"


def loss_known(status: GetJobStatusResponse) -> bool:
    """Whether there is a loss: steps were done, even if their loss is NaN, or it is a number."""
    return status.steps_done > 0 or not math.isnan(status.loss)


def batches(status: GetJobStatusResponse) -> str:
    """Names the units of a job: a step of sync mode is a round of several micro-batches."""
    return "micro-batches" if status.mode == "sync" else "batches"


def state(member: ShardStatus | WorkerStatus) -> str:
    """Describes a member: ``"active"``, ``"active, silent for 4.0 s"``, or ``"silent for 12.0 s"``
    after a lease."""
    silence = f"silent for {duration(member.silent_s)}"
    if member.state == "silent":
        return silence
    missed = member.state not in ("left", "missing") and member.silent_s >= MISSED_S
    return f"{member.state}, {silence}" if missed else member.state


def shards(indices: Iterable[int], noun: str = "shard") -> str:
    """Names shards, or slices: ``"shard 1"`` or ``"shards 0, 2"``; at least one."""
    names = [str(index) for index in indices]
    return f"{noun}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def shard_name(shard: ShardStatus) -> str:
    """Names a shard, or a slice: ``"shard 0"`` or ``"slice 0"``."""
    return f"{'slice' if shard.slice else 'shard'} {shard.shard}"


def of(have: int, of_all: int, noun: str, nouns: str) -> str:
    """Formats a count: ``"0 of 1 task"`` or ``"1 of 2 tasks"``."""
    return f"{have} of {of_all} {noun if of_all == 1 else nouns}"


def in_words(changed: Mapping[str, str]) -> str:
    """Formats changed settings of a job: ``"dense=allreduce slices=2"``, without those that are
    switched off beside others."""
    on = {key: value for key, value in changed.items() if value != "none"} or changed
    return " ".join(f"{key}={value}" for key, value in on.items())
