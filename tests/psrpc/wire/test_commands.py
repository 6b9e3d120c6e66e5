"""Commands to shards come back whole from the wire: no field is lost on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from psrpc.core.batch import BatchId
from psrpc.core.commands import (
    Attempt,
    AwaitedWorkers,
    Begin,
    Command,
    Decision,
    Ended,
    Keys,
    Release,
    Revocation,
    RoundsAhead,
    SnapshotOrder,
    WorkerClock,
)
from psrpc.core.errors import InvalidArgument
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2
from psrpc.wire.commands import (
    decision_bytes,
    from_attempt,
    from_begin,
    from_command,
    parse_decision,
    to_command,
)

ATTEMPT = Attempt(BatchId(1, 8, 4), 7)
ORDER = SnapshotOrder("step-1", 1, True, True, "checkpoints/.step-1", "checkpoints/step-0", 3)
DECISION = Decision(2, 5, (ATTEMPT, Attempt(BatchId(1, 12, 4), 9)), (ORDER,))
KEYS = Keys(b"v" * 32, b"g" * 32)
KEEP = Begin(
    2, 3, True, "", DECISION, Policy(mode="ssp", staleness=4), 40, 3.0, warmup_updates=9, keys=KEYS
)
RESTORE = dataclasses.replace(KEEP, keep=False, restore="checkpoints/step-1", version=None)
FRESH = dataclasses.replace(
    KEEP, keep=False, decision=None, settings=None, version=0, rate_scale=0.0
)
COMMANDS: dict[str, Command] = {
    "decision": DECISION,
    "rounds_ahead": RoundsAhead((DECISION, dataclasses.replace(DECISION, round=6))),
    "snapshot": ORDER,
    "release_snapshot": Release("step-1"),
    "keep": KEEP,
    "restore": RESTORE,
    "fresh": FRESH,
    "awaited": AwaitedWorkers(
        4, (WorkerClock("worker-1", 3, 17, b"proof"), WorkerClock("worker-2", 4, 0))
    ),
    "revocation": Revocation(3, "worker-1", (ATTEMPT,), ends_ahead=True),
    "shutdown": Ended(True, "the disk is full"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_comes_back_whole(name: str) -> None:
    message = to_command(COMMANDS[name])
    assert message.WhichOneof("command") == ("begin" if message.HasField("begin") else name)
    assert from_command(pb.WatchResponse.FromString(message.SerializeToString())) == COMMANDS[name]


def test_every_field_was_sent_with_another_value_than_its_default() -> None:
    """Otherwise a field that is left out would not show."""
    sent: dict[type, set[str]] = {}

    def note(value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, Policy):
            for field in dataclasses.fields(value):
                found = getattr(value, field.name)
                note(found)
                if found != field.default:
                    sent.setdefault(type(value), set()).add(field.name)
        for one in value if isinstance(value, tuple) else ():
            note(one)

    note(tuple(COMMANDS.values()))
    assert sent == {one: {f.name for f in dataclasses.fields(one)} for one in sent}


def test_an_unknown_command_is_none() -> None:
    assert from_command(pb.WatchResponse()) is None


def test_a_decision_is_signed_as_the_same_bytes_each_time() -> None:
    assert parse_decision(decision_bytes(DECISION)) == DECISION
    assert decision_bytes(DECISION) == to_command(DECISION).decision.SerializeToString()


def test_an_order_without_parts_has_the_usual_number() -> None:
    found = from_command(pb.WatchResponse(snapshot=types_pb2.SnapshotOrder(name="s")))
    assert found == SnapshotOrder("s", 0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.Begin(generation=1), "names no source"),
        (pb.Begin(keep=True), "keys of 0 and 0 bytes"),
        (pb.Begin(keep=True, settings=b"{"), "has settings"),
        (pb.Begin(keep=True, settings=b'{"mode": "none"}'), "has settings"),
    ],
)
def test_a_malformed_begin_is_refused(message: pb.Begin, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        from_begin(message)


@pytest.mark.parametrize(
    ("batch", "words"),
    [(types_pb2.BatchId(), "count 0"), (types_pb2.BatchId(first=2**63, count=1), "first 922337")],
)
def test_an_impossible_batch_is_refused(batch: types_pb2.BatchId, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        from_attempt(types_pb2.Attempt(batch=batch, attempt=1))
