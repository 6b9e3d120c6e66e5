"""Renders the page of ``coordinator status``: a pure function of ``GetJobStatusResponse``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from coordinator.core.figures import CAUSES
from coordinator.core.wording import (
    batches,
    checkpoint,
    duration,
    figure,
    loss_known,
    reason,
    shards,
    state,
    step,
    whence,
)
from coordinator.display.timeline import newest_evaluations
from psrpc.core.text import counted, sanitize
from psrpc.v1.coordinator_pb2 import (
    GetJobStatusResponse,
    ShardStatus,
    Transport,
    WorkerStatus,
)

EXACT = 4
"""Staleness below this is shown value by value, above in ranges that double."""

PAGE_CHARS = 1 << 20
"""Bound on the page, larger than the page of any cluster."""

OPEN_END = 63
"""The entry of a shard's histogram that also counts all larger values."""


def render_page(status: GetJobStatusResponse) -> str:
    """Returns the status page as lines of plain text without terminal sequences."""
    blocks = [
        _headline(status),
        _shards(status.shards, slices=False),
        _shards(status.shards, slices=True),
        _workers(status.workers),
        _counts(status),
        _news(status),
    ]
    return sanitize("\n\n".join("\n".join(lines) for lines in blocks if lines), PAGE_CHARS)


def status_as_json(message: Message) -> dict[str, Any]:
    """Returns all fields of a message by name, zeros too, as plain JSON types. Whole numbers stay
    numbers and enums become names in lower case; NaN, infinity and what is absent become null."""
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            document[field.name] = None
        elif isinstance(value, Mapping):
            document[field.name] = {key: _plain(entry) for key, entry in value.items()}
        elif field.enum_type is not None:
            document[field.name] = _enum_name(field.enum_type, value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            document[field.name] = [_plain(entry) for entry in value]
        else:
            document[field.name] = _plain(value)
    return document


def status_histogram(counts: Sequence[int]) -> str:
    """Returns the count of each staleness, ``"0:812 1:377 2:9 4-7:3"``; ``-`` without a push."""
    parts = []
    first = 0
    while first < len(counts):
        stop = first + 1 if first < EXACT else min(2 * first, max(OPEN_END, first + 1))
        count = sum(counts[first:stop])
        if count and first >= OPEN_END:
            parts.append(f"{first}+:{sum(counts[first:])}")
            break
        if count:
            parts.append(f"{first if stop == first + 1 else f'{first}-{stop - 1}'}:{count}")
        first = stop
    return " ".join(parts) or "-"


def _enum_name(kind: Any, number: int) -> str:
    """Returns ``"shared_memory"`` for ``KIND_SHARED_MEMORY``; the number of a value that only later
    versions know."""
    value = kind.values_by_number.get(number)
    prefix = f"{kind.name.upper()}_"
    return str(number) if value is None else value.name.removeprefix(prefix).lower()


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return status_as_json(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _headline(status: GetJobStatusResponse) -> list[str]:
    lines = [f"{status.job}  {status.phase}  {status.settings or status.mode}"]
    if status.insecure:
        lines.append("INSECURE: plaintext; anyone who reaches its ports can change the model")
    if status.switching:
        lines.append(f"under way: {status.switching}")
    if status.changed:
        lines.append(f"set while it ran: {' '.join(status.changed)}")
    if len(status.policies) > 1:
        lines += [
            f"policy {change.policy} from step {change.global_step}: {change.settings}"
            for change in status.policies
        ]
    figures = []
    if whence(status):
        figures.append(whence(status))
    elif status.total_steps:
        figures.append(step(status))
    if status.epoch and not whence(status):
        figures.append(f"epoch {status.epoch}/{status.epochs}")
    if loss_known(status):
        figures.append(f"loss {figure(status.loss)}")
    figures += [
        f"{status.batches_per_s:.1f} {batches(status)}/s",
        f"{status.examples_per_s:.0f} examples/s",
        f"{status.batches} {batches(status)}",
        counted(status.examples, "example"),
    ]
    lines.append("  ".join(figures))
    lines.append(
        f"staleness {status_histogram(status.staleness_counts)}  mean {status.mean_staleness:.2f}  "
        f"version skew {status.version_skew}"
    )
    if status.HasField("summed"):
        lines.append(f"exact=False: sums in {status.summed} of {status.steps_done} rounds")
    origin = f"  from {checkpoint(status.restored)}" if status.restored else ""
    lines.append(f"run {status.run_id}  generation {status.generation}{origin}")
    return lines


def _shards(shards: Sequence[ShardStatus], *, slices: bool) -> list[str]:
    """Returns the table of the shards, or of the slices with the workers that host them."""
    found = [shard for shard in shards if shard.slice == slices]
    if not found:
        return []
    first = ("slice", "worker") if slices else ("shard",)
    titles = (*first, "state", "version", "size", "updates", "staleness", "waiting for")
    return _table(
        [
            titles,
            *(
                (
                    f"{shard.shard} {shard.address}".rstrip(),
                    *([shard.worker or "-"] if slices else []),
                    state(shard),
                    str(shard.version),
                    _size(shard),
                    f"{shard.apply_s:.1f} s",
                    status_histogram(shard.staleness_counts),
                    shard.waiting_for,
                )
                for shard in found
            ),
        ]
    )


def _size(shard: ShardStatus) -> str:
    size = f"{shard.nbytes / 1e6:.1f} MB"
    if shard.table_nbytes:
        size += f", {counted(shard.table_rows, 'row')} {shard.table_nbytes / 1e6:.1f} MB"
    return size


def _workers(workers: Sequence[WorkerStatus]) -> list[str]:
    if not workers:
        return []
    titles = ("worker", "state", "batches", "batches/s", "examples/s", *CAUSES, "slowness")
    rows: list[Sequence[str]] = [(*titles, "staleness", "waiting for")]
    for worker in workers:
        spent = [getattr(worker.times, cause) for cause in CAUSES]
        total = sum(spent)
        rows.append(
            (
                f"{worker.worker} {worker.host} pid {worker.pid}",
                state(worker),
                str(worker.batches),
                f"{worker.batches_per_s:.1f}",
                f"{worker.examples_per_s:.0f}",
                *(f"{100 * seconds / total:.0f} %" if total else "-" for seconds in spent),
                f"{worker.slowness:.2f}" if worker.slowness else "-",
                status_histogram(worker.staleness_counts),
                worker.waiting_for,
            )
        )
    return _table(rows)


def _fallbacks(worker: WorkerStatus) -> list[str]:
    """Returns which of a worker's tensors use a slower transport than possible, and why."""
    found: dict[str, list[int]] = {}
    for transport in worker.transports:
        if transport.kind == Transport.KIND_CALLS:
            found.setdefault(transport.why, []).append(transport.shard)
    return [
        f"slow transport: tensors of {worker.worker} and {shards(of)} go with the calls: {why}"
        for why, of in found.items()
    ]


def _counts(status: GetJobStatusResponse) -> list[str]:
    counts = {
        "refused": status.refused,
        "skipped": status.skipped,
        "failed": status.failed,
        "too stale": status.too_stale,
        "speculative": status.speculative,
        "superseded": status.superseded,
        "late": status.late,
        "overdue": status.overdue,
        "uncompensated": sum(shard.uncompensated for shard in status.shards),
    }
    return ["  ".join(f"{name} {count}" for name, count in counts.items())]


def _news(status: GetJobStatusResponse) -> list[str]:
    lines = [f"stuck: {line}" for line in status.stuck]
    lines += [f"straggler: {line}" for line in status.stragglers]
    lines += [line for worker in status.workers for line in _fallbacks(worker)]
    lines += newest_evaluations(status)
    age = f", {duration(status.checkpoint_age_s)} ago" if status.checkpoint_age_s >= 0 else ""
    checkpoint = status.newest_checkpoint
    lines.append(f"last checkpoint: {checkpoint}{age}" if checkpoint else "last checkpoint: none")
    if status.waiting_for:
        since = f" (for {duration(status.waited_s)})" if status.waited_s else ""
        lines.append(f"waiting for {status.waiting_for}{since}")
    lines += [f"warning: {line}" for line in status.warnings]
    if status.reason:
        lines.append(reason(status))
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats columns as wide as their widest entry, two spaces apart, figures right-aligned."""
    widths = [max(len(entry) for entry in column) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        entries = [
            entry.rjust(width)
            if _is_figure(rows[1:], column) and (number or entry)
            else entry.ljust(width)
            for column, (entry, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(entries).rstrip())
    return lines


def _is_figure(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column][:1].isdigit() and ":" not in row[column] for row in rows)
