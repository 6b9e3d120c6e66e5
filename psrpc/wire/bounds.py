"""Bounds of every string, bytes and repeated field of a request.

A server checks a request once, right after decoding it. The bounds are needed because servers keep,
log and forward strings (a shard sends its coordinator the names of pushing workers): an unbounded
string would take memory, and could make a later message too long to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from psrpc.core.batch import MAX_VALUES
from psrpc.core.errors import InvalidArgument
from psrpc.core.shard_reports import MAX_EPOCHS
from psrpc.core.tables import MAX_IDS
from psrpc.core.tensor_form import MAX_SHARDS
from psrpc.wire.codec import MAX_CHUNK_BYTES

NAME = 255
"""Characters of a name, an address, a digest or a version; bytes of a hash. Names of snapshots
become file names. The smallest bound of messages sent with every step, see :func:`check_bounds`."""

TEXT = 16_384
"""Characters of a reason to wait or to fail. Servers show fewer
(:data:`psrpc.core.text.WORDS_CHARS`); our clients cut longer ones, see :func:`shorten`."""

EXTENTS = 1 << 14
"""Arenas and tables of a plan."""

EPOCHS = 1 << 16
INTERVALS = 1 << 20
"""Applied or skipped intervals of one epoch."""

REPORTS = 1 << 16
"""Batches or attempts per message."""

DEVICES = 64
"""Micro-batches that a worker computes at once. More count as so many."""

SUMMED = NAME
"""Further batches of a sum. A shard takes fewer, see
:data:`pserver.engine.push_checks.MAX_SUMMED`; fewer than NAME are not looked at here."""

WORKERS = 256
"""Workers whose figures a shard reports, see :data:`pserver.core.counters.MAX_WORKERS`."""

COUNTS = 256
"""Entries of a histogram."""

STATES = 1 << 12
"""Variables of metrics, or results by name."""

BOUNDS: Mapping[str, Mapping[str, int]] = {
    # types.proto
    "Fence": {"plan_hash": NAME, "session": NAME},
    "SignedDecision": {"decision": 1 << 22, "signature": NAME},
    "TableIds": {"ids": 8 * MAX_IDS},
    "Chunk": {"data": MAX_CHUNK_BYTES},
    "AppliedEpoch": {"applied": INTERVALS, "skipped": INTERVALS, "totals": MAX_VALUES},
    "EpochTotals": {"totals": MAX_VALUES},
    "WorkerStaleness": {"worker": NAME, "counts": COUNTS},
    "WorkerClock": {"worker": NAME, "proof": NAME},
    # parameter_server.proto
    "InitializeHeader": {"extents": EXTENTS, "grant": NAME},
    "PullRequest": {"snapshot": NAME, "rows": EXTENTS, "staged": REPORTS},
    "StagedEverywhere": {"receipts": MAX_SHARDS},
    "StagedEverywhere.receipts": {"": NAME},
    "PushHeader": {
        "extents": EXTENTS,
        "rows": EXTENTS,
        "totals": MAX_VALUES,
        "grant": NAME,
        "summed": SUMMED,
    },
    "SummedBatch": {"totals": MAX_VALUES, "grant": NAME},
    "Attach": {"nonce": NAME},
    "ExchangeHeader": {"push_at": EXTENTS, "pull_at": EXTENTS},
    "LookUpRequest": {"table": NAME, "ids": 8 * MAX_IDS},
    # coordinator.proto
    "RegisterShardRequest": {"address": NAME, "host": NAME, "software": NAME},
    "ReportShardReadyRequest": {"applied": EPOCHS, "error": TEXT},
    "HeartbeatShardRequest": {
        "staleness_counts": COUNTS,
        "waiting_for": TEXT,
        "failure": TEXT,
        "workers": WORKERS,
        "epochs": MAX_EPOCHS,
    },
    "ReportSnapshotRequest": {
        "name": NAME,
        "file": NAME,
        "sha256": NAME,
        "error": TEXT,
        "rows": 1 << 12,
        "epochs": MAX_EPOCHS,
    },
    "RowsFile": {"file": NAME, "sha256": NAME},
    "RegisterWorkerRequest": {
        "host": NAME,
        "job_sha256": NAME,
        "software": NAME,
        "device": NAME,
        "settings_sha256": NAME,
        "secret": NAME,
    },
    "BatchReport": {"receipts": MAX_SHARDS, "not_finite": TEXT},
    "BatchReport.receipts": {"": NAME},
    "Transport": {"why": TEXT},
    "HeartbeatWorkerRequest": {
        "session": NAME,
        "done": REPORTS,
        "waiting_for": TEXT,
        "unreachable": MAX_SHARDS,
        "transports": MAX_SHARDS,
    },
    "GetClusterRequest": {"session": NAME},
    "LeaseWorkRequest": {"session": NAME, "done": REPORTS},
    "CommitBatchRequest": {"session": NAME},
    "ReportWorkRequest": {"session": NAME},
    "EvaluateDone": {"evaluation": NAME},
    "MetricStates": {"variables": STATES},
    "MetricVariable": {"shape": 32, "values": 1 << 20},
    "MergeDone": {"evaluation": NAME, "results": STATES},
    "MergeDone.ResultsEntry": {"key": 4 * NAME},
    "LeaveWorkerRequest": {"session": NAME, "reason": TEXT},
    "RevokeWorkerRequest": {"worker": NAME, "reason": TEXT},
    "EndHoldRequest": {"restore": NAME},
    "SetPolicyRequest": {"settings": 256},
    "SetPolicyRequest.settings": {"": 4096},
}
"""Bounds by message and field: characters of a string, bytes, or entries of a repeated field.
``Message.field`` has the bound of each repeated string or bytes. A test compares the protos."""

_PACKAGE = "psrpc.v1."


class _Form(NamedTuple):
    """The fields of a message to check, by name, with their bounds or forms."""

    lengths: tuple[tuple[str, int, str], ...]
    """Fields with a bounded ``len``: name, bound, unit."""
    words: tuple[tuple[str, int], ...]
    """Repeated strings and keys of maps, with the bound of each."""
    parts: tuple[tuple[str, _Form], ...]
    each: tuple[tuple[str, _Form], ...]
    name: str = ""
    least: int = 0
    """The smallest bound in the message. A message that is shorter than this cannot exceed any."""

    @property
    def empty(self) -> bool:
        return not (self.lengths or self.words or self.parts or self.each)


def check_bounds(message: Message, nbytes: int) -> None:
    """Checks the bounds of all fields of a request of ``nbytes`` on the wire, nested ones included.
    Takes no time if the whole message is shorter than its smallest bound, as most headers of
    exchanges are.

    Raises:
        InvalidArgument: names the field, its size and the bound.
    """
    form = _form(message.DESCRIPTOR)
    if nbytes > form.least:
        _check(message, form)


def shorten(message: Any) -> None:
    """Cuts texts that exceed the bound :data:`TEXT`. Senders need it because an error text may have
    any length; its beginning says enough."""
    form = _form(message.DESCRIPTOR)
    for name, bound, _ in form.lengths:
        if bound == TEXT and len(getattr(message, name)) > bound:
            setattr(message, name, getattr(message, name)[: bound - 1] + "…")
    for name, _ in form.each:
        for one in getattr(message, name):
            shorten(one)


def _check(message: Any, form: _Form) -> None:
    for name, bound, unit in form.lengths:
        length = len(getattr(message, name))
        if length > bound:
            raise _too_long(form.name, name, length, unit, bound)
    for name, bound in form.words:
        for word in getattr(message, name):
            if len(word) > bound:
                raise _too_long(form.name, f"{name}, an entry of it,", len(word), _CHARS, bound)
    for name, part in form.parts:
        if message.HasField(name):
            _check(getattr(message, name), part)
    for name, part in form.each:
        for one in getattr(message, name):
            _check(one, part)


def _too_long(message: str, field: str, length: int, unit: str, bound: int) -> InvalidArgument:
    return InvalidArgument(f"{message}.{field} has {length} {unit}; expected at most {bound}")


_CHARS, _BYTES, _ENTRIES = "characters", "bytes", "entries"


@cache
def _form(descriptor: Descriptor) -> _Form:
    if not descriptor.full_name.startswith(_PACKAGE):
        return _Form((), (), (), ())
    name = descriptor.full_name.removeprefix(_PACKAGE)
    bounds = BOUNDS.get(name, {})
    lengths, words = [], []
    parts: list[tuple[str, _Form]] = []
    each: list[tuple[str, _Form]] = []
    for field in descriptor.fields:
        unit = _unit(field)
        if unit and field.name in bounds:
            lengths.append((field.name, bounds[field.name], unit))
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            entry = BOUNDS.get(inner.full_name.removeprefix(_PACKAGE), {})
            if "key" in entry:
                words.append((field.name, entry["key"]))
        elif inner is not None:
            form = _form(inner)
            if not form.empty:
                (each if field.is_repeated else parts).append((field.name, form))
        elif unit == _ENTRIES and field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            own = BOUNDS.get(f"{name}.{field.name}", {})
            words += [(field.name, bound) for bound in own.values()]
    least = min(
        [
            *(bound for _, bound, _ in lengths),
            *(bound for _, bound in words),
            *(inner.least for _, inner in (*parts, *each)),
        ],
        default=0,
    )
    return _Form(tuple(lengths), tuple(words), tuple(parts), tuple(each), name, least)


def _unit(field: FieldDescriptor) -> str:
    """Returns the unit of a field's length; empty for a field without one."""
    if field.is_repeated:
        return _ENTRIES
    return {field.TYPE_STRING: _CHARS, field.TYPE_BYTES: _BYTES}.get(field.type, "")
