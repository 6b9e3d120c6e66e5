"""Commands as they come: what is answered, and what is read for it."""

from __future__ import annotations

import pytest

from pserver.core.requests import RestoredState
from pserver.engine.engine import ShardEngine
from pserver.process.commands import obey
from psrpc.core.errors import CheckpointError
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.bare_engine import PLAN, A, a_push, checkpoint, here, initialized, values
from tests.pserver.fake_coordinator import begin_at
from tests.pserver.shards import engine_of


class Disk:
    """Checkpoints by name, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.good = {"checkpoints/good": 7.0}

    def __call__(self, name: str) -> RestoredState:
        self.read.append(name)
        if name not in self.good:
            raise CheckpointError(f"{name} is damaged")
        return checkpoint(self.good[name], 3, A)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def engine() -> ShardEngine:
    return initialized(engine_of(PLAN))


def restore(generation: int, name: str = "checkpoints/good") -> pb.WatchResponse:
    return pb.WatchResponse(begin=begin_at(generation, restore=name))


def test_a_checkpoint_is_read_once(engine: ShardEngine, disk: Disk) -> None:
    first = obey(engine, restore(2), disk)
    assert first is not None
    assert (first.generation, first.version, first.initialized, first.error) == (2, 3, True, "")
    assert obey(engine, restore(2), disk) == first
    assert disk.read == ["checkpoints/good"]
    assert values(engine, 2) == [7]


def test_an_order_of_before_is_not_answered(engine: ShardEngine, disk: Disk) -> None:
    obey(engine, restore(4), disk)
    assert obey(engine, restore(3, "checkpoints/bad"), disk) is None
    assert disk.read == ["checkpoints/good"]


def test_a_damaged_checkpoint_changes_nothing(engine: ShardEngine, disk: Disk) -> None:
    engine.push(a_push(), here(1), 0)
    report = obey(engine, restore(2, "checkpoints/bad"), disk)
    assert report is not None
    assert (report.generation, report.error) == (2, "checkpoints/bad is damaged")
    assert not report.applied
    assert values(engine, 1) == [-1]
    again = obey(engine, restore(2, "checkpoints/bad"), disk)
    assert again == report
    better = obey(engine, restore(3), disk)
    assert better is not None
    assert (better.generation, better.version, better.error) == (3, 3, "")


@pytest.mark.parametrize(
    "command",
    [
        pb.WatchResponse(decision=types.Decision(generation=9, round=4)),
        pb.WatchResponse(decision=types.Decision(generation=1, round=4)),
        pb.WatchResponse(release_snapshot="step-9"),
        pb.WatchResponse(),
    ],
    ids=["another generation", "a later round", "no such snapshot", "nothing"],
)
def test_a_failed_command_changes_nothing(
    engine: ShardEngine, disk: Disk, command: pb.WatchResponse
) -> None:
    assert obey(engine, command, disk) is None
    assert values(engine, 1) == [0]
    assert engine.report().version == 0
