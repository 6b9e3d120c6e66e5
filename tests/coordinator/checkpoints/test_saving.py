"""When snapshots are ordered, and what becomes of them."""

from __future__ import annotations

import pytest

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.saving import Saving
from coordinator.checkpoints.snapshots import Failed, Snapshots, Taken
from coordinator.core.lifecycle import Facts, Phase, next_phase
from coordinator.schedule.evaluation import Evaluations
from psrpc.checkpoint.checkpoint_every import DEFAULT_S, SaveInterval, read_checkpoint_every
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import InvalidArgument
from psrpc.core.shard_reports import ShardFile
from psrpc.ops.clock import ManualClock

EVERY_10 = SaveInterval(steps=10)


class Parts:
    """A Saving with what it works on."""

    def __init__(
        self,
        shards: int = 1,
        evaluates: bool = True,
        restored: int | None = None,
        generation: int = 1,
        writes_epochs: bool = False,
        every: SaveInterval = EVERY_10,
    ):
        self.clock = ManualClock()
        self.snapshots = Snapshots(shards)
        self.evaluations = Evaluations(10 if evaluates else 0, 10)
        self.saving = Saving(
            snapshots=self.snapshots,
            evaluations=self.evaluations,
            cadence=Cadence(every, self.clock),
            last_epoch=4,
            evaluates=evaluates,
            saved_step=restored,
            first_saved=restored is not None,
            generation=generation,
            writes_epochs=writes_epochs,
        )

    def finish(self, order: SnapshotOrder | None) -> None:
        """All shards take it, and it is committed."""
        assert order is not None
        for shard in range(self.snapshots._shards):
            self.snapshots.report(order.name, ShardFile(shard, 0), "")
        self.snapshots.written(order.name)
        self.saving.taken(order.name)


def order(name: str, step: int, write: bool, keep: bool) -> SnapshotOrder:
    return SnapshotOrder(name, step, write, keep, f"checkpoints/.tmp-{name}" if write else "")


def test_the_first_checkpoint_comes_once() -> None:
    parts = Parts()
    first = parts.saving.order_first(0)
    assert first == order("step-00000000", 0, True, False)
    assert parts.saving.order_first(0) is None
    saved = [parts.saving.first_saved]
    parts.finish(first)
    assert [*saved, parts.saving.first_saved] == [False, True]
    assert not parts.saving.request(0), "it holds what the shards hold now"


def test_the_first_checkpoint_may_be_the_final_one() -> None:
    """All was trained, and the shards have kept it; that they were ever saved was not noted."""
    saving = (parts := Parts(evaluates=False, generation=2)).saving
    first = saving.order_first(50)
    assert first == order("step-00000050.g2", 50, True, False)
    parts.finish(first)
    assert saving.next_order(50, True) is None
    assert saving.final.saved


def test_a_checkpoint_is_due_when_a_multiple_is_passed_and_one_is_written_at_a_time() -> None:
    saving = (parts := Parts()).saving
    saving.stepped(0, 9, [])
    assert saving.next_order(9, False) is None
    saving.stepped(9, 12, [])
    first = saving.next_order(12, False)
    assert first == order("step-00000012", 12, True, False)
    saving.stepped(12, 33, [])
    assert saving.next_order(33, False) is None
    parts.finish(first)
    assert saving.next_order(35, False) == order("step-00000035", 35, True, False)


def test_an_epoch_is_kept_for_evaluation_with_the_checkpoint_or_without() -> None:
    saving = Parts().saving
    saving.stepped(0, 7, [0])
    assert saving.next_order(7, False) == order("epoch-1", 7, False, True)
    saving.stepped(7, 14, [1])
    assert saving.next_order(14, False) == order("step-00000014", 14, True, True)
    assert saving.next_order(14, False) is None
    assert saving.warnings == []


def test_an_epoch_that_finds_no_room_is_not_evaluated_and_said_so() -> None:
    saving = Parts().saving
    for epoch in range(3):
        saving.stepped(epoch, epoch + 1, [epoch])
        saving.next_order(epoch + 1, False)
    assert saving.warnings == [
        "epoch 3 is not evaluated: the evaluations of earlier epochs still run; with "
        "evaluate_every_epoch=True epochs wait for them"
    ]
    final = saving.next_order(5, True)
    assert final == order("step-00000005", 5, True, True)


def test_an_epoch_that_is_not_evaluated_is_said_not_to_be_the_best() -> None:
    saving = (parts := Parts(writes_epochs=True)).saving
    for epoch in range(3):
        saving.stepped(epoch, epoch + 1, [epoch])
        written = saving.next_order(epoch + 1, False)
        if written is not None:
            parts.finish(written)
    [left_out] = saving.warnings
    assert left_out.startswith("epoch 3 is not evaluated, so it cannot be kept as the best one: ")


def test_the_final_checkpoint_waits_for_the_one_before_but_a_decision_does_not() -> None:
    for by_decision in (False, True):
        saving = (parts := Parts()).saving
        saving.stepped(0, 10, [])
        earlier = saving.next_order(10, False, by_decision)
        saving.stepped(10, 15, [4])
        final = saving.next_order(15, True, by_decision)
        assert (final is not None) == by_decision
        parts.finish(earlier)
        if not by_decision:
            final = saving.next_order(15, True)
        assert final == order("step-00000015", 15, True, True)
        assert (saving.final.saved, saving.final_evaluated) == (False, False)
        parts.finish(final)
        assert (saving.final.saved, saving.final_evaluated) == (True, False)


def test_shards_never_have_to_write_three_checkpoints_at_once() -> None:
    """They refuse the third, and without its final checkpoint a job fails."""
    saving = (parts := Parts(writes_epochs=True)).saving
    saving.stepped(0, 10, [])
    periodic = saving.next_order(10, False, True)
    saving.stepped(10, 12, [3])
    epoch = saving.next_order(12, False, True)
    saving.stepped(12, 15, [4])
    assert saving.next_order(15, True, by_decision=True) is None
    for earlier in (periodic, epoch):
        assert saving.next_order(15, True) is None
        parts.finish(earlier)
    assert saving.next_order(15, True) == order("step-00000015", 15, True, True)


def test_without_evaluation_data_the_final_state_is_only_written() -> None:
    saving = (parts := Parts(evaluates=False)).saving
    saving.stepped(0, 7, [0])
    assert saving.next_order(7, False) is None
    parts.finish(saving.next_order(9, True))
    assert saving.final.saved
    assert saving.final_evaluated


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_job_resumed_at_its_end_writes_nothing_twice(evaluates: bool) -> None:
    saving = (parts := Parts(evaluates=evaluates, restored=20)).saving
    assert saving.first_saved
    final = saving.next_order(20, True)
    if evaluates:
        assert final == order("final", 20, False, True)
        parts.finish(final)
    else:
        assert final is None
    assert saving.final.saved


def test_names_of_a_later_generation_are_its_own() -> None:
    saving = (parts := Parts(restored=20, generation=3)).saving
    saving.stepped(20, 27, [1])
    epoch = saving.next_order(27, False)
    assert epoch == order("epoch-2.g3", 27, False, True)
    saving.stepped(27, 30, [])
    written = saving.next_order(30, False)
    assert written == order("step-00000030.g3", 30, True, False)
    parts.finish(written)
    assert Parts(restored=20, generation=3).saving.next_order(20, True) == order(
        "final.g3", 20, False, True
    )


@pytest.mark.parametrize("by_decision", [False, True])
def test_the_best_can_be_kept_only_if_every_evaluated_state_is_written(by_decision: bool) -> None:
    saving = (parts := Parts(writes_epochs=True)).saving
    saving.stepped(0, 7, [0])
    first = saving.next_order(7, False, by_decision)
    assert first == order("step-00000007", 7, True, True)
    assert parts.evaluations.snapshots == ("step-00000007",)
    assert saving.next_order(7, False, by_decision) is None
    saving.stepped(7, 9, [1])
    second = saving.next_order(9, False, by_decision)
    # A decision does not wait, and it has the state of the very round.
    assert second == (order("step-00000009", 9, True, True) if by_decision else None)
    parts.finish(first)
    if not by_decision:
        second = saving.next_order(11, False)
        assert second == order("step-00000011", 11, True, True)
    parts.finish(second)
    assert saving.warnings == []


def test_an_epoch_that_cannot_be_written_is_evaluated_all_the_same() -> None:
    saving = Parts(writes_epochs=True).saving
    saving.stepped(0, 10, [])
    assert saving.next_order(10, False, True) == order("step-00000010", 10, True, False)
    saving.stepped(10, 17, [0])
    assert saving.next_order(17, False, True) == order("step-00000017", 17, True, True)
    saving.stepped(17, 18, [1])
    assert saving.next_order(18, False, True) == order("epoch-2", 18, False, True)
    assert saving.warnings == [
        "epoch 2 is evaluated, but cannot be kept as the best one: earlier checkpoints are still "
        "written"
    ]


def test_no_checkpoint_is_written_twice_at_one_step() -> None:
    saving = (parts := Parts(writes_epochs=True)).saving
    saving.stepped(0, 10, [0, 1])
    both = saving.next_order(10, False)
    assert both == order("step-00000010", 10, True, True)
    parts.finish(both)
    assert saving.next_order(10, False) == order("epoch-2", 10, False, True)


def test_a_failure_is_a_warning_unless_it_is_of_the_first_state() -> None:
    saving = (parts := Parts()).saving
    first = saving.order_first(0)
    assert first is not None
    assert "no space" in (saving.failed(Failed(first, "no space")) or "")
    parts.snapshots.written(first.name)
    saving.stepped(0, 10, [0])
    both = saving.next_order(10, False)
    assert both is not None
    assert saving.failed(Failed(both, "shard 0: no space")) is None
    assert saving.warnings == [
        "snapshot step-00000010 failed: shard 0: no space; not evaluated: epoch-1"
    ]


def test_checkpoints_that_fail_in_any_order_never_give_their_names_to_others() -> None:
    saving = (parts := Parts(writes_epochs=True)).saving
    saving.stepped(0, 10, [])
    earlier = saving.next_order(10, False, True)
    saving.stepped(10, 17, [0])
    later = saving.next_order(17, False, True)
    for lost in (later, earlier):
        assert lost is not None
        parts.snapshots.report(lost.name, ShardFile(0, 0), "no space")
        assert saving.failed(Failed(lost, "no space")) is None
    assert saving.request(17)
    assert saving.next_order(17, False) == order("step-00000017.r2", 17, True, False)


def test_a_final_state_that_cannot_be_saved_is_ordered_again_under_another_name() -> None:
    """The trained state is in the shards alone: ending the job would throw it away."""
    saving = (parts := Parts(generation=2)).saving
    final = saving.next_order(50, True)
    for number, pause_s in enumerate((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0), 1):
        assert final is not None
        parts.snapshots.report(final.name, ShardFile(0, 0), "no space")
        assert saving.failed(Failed(final, f"no space {number}")) is None
        parts.snapshots.release(final.name)
        assert saving.final.waiting_for() == (
            f"the final state to be saved: no space {number}; tried again after {pause_s:.0f} s"
        )
        assert (saving.final.saved, saving.final_evaluated) == (False, False)
        for now in (100.0, 99.9 + pause_s):
            saving.final.retry(now)
            assert saving.next_order(50, True) is None
        saving.final.retry(100.0 + pause_s)
        final = saving.next_order(50, True)
        assert final == order(f"step-00000050.g2.r{number}", 50, True, True)
        assert saving.final.waiting_for() == ""
    assert parts.evaluations.snapshots == ("step-00000050.g2.r8",)
    parts.finish(final)
    assert saving.final.saved
    assert saving.warnings == [
        "the final state cannot be saved as step-00000050.g2: no space 1; the shards keep it, and "
        "it is tried again until it is saved"
    ]


def test_a_final_state_that_is_only_evaluated_is_kept_again_too() -> None:
    saving = (parts := Parts(restored=20)).saving
    final = saving.next_order(20, True)
    assert final is not None
    parts.snapshots.report(final.name, ShardFile(0, 0), "no room")
    assert saving.failed(Failed(final, "no room")) is None
    parts.snapshots.release(final.name)
    for now in (0.0, 10.0):
        saving.final.retry(now)
    assert saving.next_order(20, True) == order("final.r1", 20, False, True)


def test_a_snapshot_is_taken_when_every_shard_has_said_so() -> None:
    snapshots = Snapshots(2)
    wanted = order("s", 1, True, True)
    snapshots.order(wanted)
    one, two = ShardFile(0, 1, "a", 3, "00"), ShardFile(1, 1, "b", 3, "11")
    assert snapshots.waiting_for() == "snapshot s of shards 0, 1"
    assert snapshots.report("s", two, "") is None
    assert snapshots.lacking(0) == [wanted]
    assert snapshots.lacking(1) == []
    assert snapshots.waiting_for() == "snapshot s of shard 0"
    assert snapshots.report("s", two, "") is None
    assert snapshots.report("s", one, "") == Taken(wanted, (one, two))
    assert snapshots.report("s", one, "") is None
    writing = snapshots.writing
    snapshots.written("s")
    assert (writing, snapshots.writing) == (True, False)
    with pytest.raises(InvalidArgument, match="'t' was not ordered"):
        snapshots.report("t", one, "")


def test_orders_that_ride_in_a_decision_are_not_repeated_without_it() -> None:
    snapshots = Snapshots(1)
    snapshots.order(order("s", 1, True, False), by_decision=True)
    assert snapshots.lacking(0) == []


def test_a_release_makes_room_and_is_remembered() -> None:
    snapshots = Snapshots(1)
    snapshots.order(order("s", 1, False, True))
    assert snapshots.room == 2
    assert snapshots.release("s")
    assert not snapshots.release("s")
    assert snapshots.room == 3
    assert snapshots.released == ("s",)


NOTHING = Facts(False, False, False, False, False, False)


@pytest.mark.parametrize(
    ("phase", "facts", "expected"),
    [
        ("waiting", NOTHING, None),
        ("waiting", Facts(True, False, False, False, False, False), "initializing"),
        ("waiting", Facts(True, True, True, False, False, False), "training"),
        ("initializing", Facts(True, True, False, False, False, False), None),
        ("initializing", Facts(True, True, True, False, False, False), "training"),
        ("training", Facts(True, True, True, False, False, False), None),
        ("training", Facts(True, True, True, True, False, False), "finishing"),
        ("finishing", Facts(True, True, True, True, True, False), None),
        ("finishing", Facts(True, True, True, True, False, True), None),
        ("finishing", Facts(True, True, True, True, True, True), "done"),
        ("done", Facts(True, True, True, True, True, True), None),
        ("failed", Facts(True, True, True, True, True, True), None),
    ],
)
def test_phases_follow_the_facts(phase: Phase, facts: Facts, expected: str | None) -> None:
    transition = next_phase(phase, facts)
    assert (transition.phase if transition else None) == expected


def test_a_checkpoint_that_is_asked_for_is_written_unless_there_is_one_of_the_step() -> None:
    parts = Parts(restored=3)
    assert not parts.saving.request(3)
    assert parts.saving.next_order(3, trained=False) is None
    assert parts.saving.request(4)
    parts.finish(parts.saving.next_order(4, trained=False))
    assert not parts.saving.request(4)


def test_time_alone_makes_a_checkpoint_due_where_something_was_trained() -> None:
    parts = Parts(every=read_checkpoint_every(None))
    parts.finish(parts.saving.order_first(0))
    parts.clock.advance(2 * DEFAULT_S)
    parts.saving.look(0)
    assert parts.saving.next_order(0, False) is None, "the state is on the disk"
    parts.saving.stepped(0, 3, [])
    parts.finish(parts.saving.next_order(3, False))
    parts.saving.stepped(3, 4, [])
    parts.clock.advance(DEFAULT_S)
    assert parts.saving.next_order(4, False) is None
    parts.saving.look(4)
    by_decision = parts.saving.next_order(5, False, by_decision=True)
    assert by_decision == order("step-00000005", 5, True, False)
    parts.clock.advance(10 * DEFAULT_S)
    parts.saving.look(5)
    assert parts.saving.next_order(6, False) is None, "one is being written"
