"""With which decision a generation begins whose shards applied rounds that were decided ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.records.store import Store
from coordinator.training.generations import Generations
from psrpc.core.commands import Begin, Command, Decision, RoundsAhead
from psrpc.core.shard_reports import HeldReport, HeldState
from tests.coordinator.builders import QueuedDisk, make_run

GENERATION = 3
"""The one that the shards stand at. They have kept their state since generation 2."""


def decided(number: int, generation: int = GENERATION) -> Decision:
    return Decision(generation, number, ())


def begun(
    tmp_path: Path,
    versions: Sequence[int],
    *,
    last: Decision | None = None,
    ahead: Sequence[Decision] = (),
) -> list[Begin]:
    """Orders for two shards at these versions by a coordinator with these decisions; nothing
    where no checkpoint could be restored either."""
    told: list[Command] = []
    run = make_run(tmp_path, shards=2, mode="sync", replicas=2, generation=GENERATION)
    run = replace(run, since=2)
    with Store(tmp_path / "ledger.sqlite") as store:
        if last is not None:
            store.put_decision(last)
        if ahead:
            store.put_ahead(RoundsAhead(tuple(ahead)))
        disk = QueuedDisk(run)
        generations = Generations(run, store, disk, lambda _, c: told.append(c), lambda: None)
        for shard, version in enumerate(versions):
            generations.formation.stands(shard, HeldState(10 + shard, GENERATION, True, version))
        assert generations.form_if_due() == (not generations._choosing)
    return [command for command in told if isinstance(command, Begin)]


def kept_with(begins: Sequence[Begin]) -> Decision | None:
    """The decision of orders that are alike and keep what shards hold."""
    assert len(begins) == 2
    assert {(begin.keep, begin.generation) for begin in begins} == {(True, GENERATION + 1)}
    assert begins[0].decision == begins[1].decision
    return begins[0].decision


AHEAD = [decided(number) for number in (5, 6, 7, 8)]


def test_the_round_that_only_one_shard_has_applied(tmp_path: Path) -> None:
    begins = begun(tmp_path, (7, 6), last=decided(4), ahead=AHEAD)
    assert kept_with(begins) == decided(6)


def test_none_where_all_have_applied_the_same(tmp_path: Path) -> None:
    """Beyond the last ordinary decision, of which alone they would seem to be of no known round."""
    assert kept_with(begun(tmp_path, (7, 7), last=decided(4), ahead=AHEAD)) is None


def test_none_where_there_was_never_another_decision(tmp_path: Path) -> None:
    assert kept_with(begun(tmp_path, (9, 9), ahead=AHEAD)) is None


def test_the_ordinary_one_where_no_shard_has_gone_beyond_it(tmp_path: Path) -> None:
    for number, versions in enumerate([(5, 4), (4, 5), (5, 5)]):
        path = tmp_path / str(number)
        path.mkdir()
        assert kept_with(begun(path, versions, last=decided(4), ahead=AHEAD)) == decided(4)


def test_the_ordinary_one_where_it_is_newer(tmp_path: Path) -> None:
    last = decided(9)
    assert kept_with(begun(tmp_path, (10, 9), last=last, ahead=AHEAD)) == last


def test_the_ordinary_one_of_a_later_generation_than_the_one_ahead(tmp_path: Path) -> None:
    ahead = [decided(6, generation=2)]
    assert kept_with(begun(tmp_path, (7, 6), last=decided(6), ahead=ahead)) == decided(6)


def test_one_ahead_of_an_earlier_generation_of_the_same_history(tmp_path: Path) -> None:
    """Its shards were told to begin again, and their coordinator died before they did."""
    ahead = [decided(6, generation=2)]
    last = decided(4, generation=2)
    assert kept_with(begun(tmp_path, (7, 6), last=last, ahead=ahead)) == ahead[0]


def test_of_two_of_one_round_that_of_the_later_generation(tmp_path: Path) -> None:
    ahead = [decided(6, generation=2), decided(6)]
    assert kept_with(begun(tmp_path, (7, 6), ahead=ahead)) == decided(6)


@pytest.mark.parametrize("ahead", [[decided(6, generation=1)], [decided(5)], AHEAD[:1] + AHEAD[2:]])
def test_shards_that_stand_apart_without_a_decision_of_their_round_go_back(
    tmp_path: Path, ahead: list[Decision]
) -> None:
    """One of another history is none."""
    begins = begun(tmp_path, (7, 6), last=decided(4), ahead=ahead)
    assert all(not begin.keep for begin in begins)


def test_shards_two_rounds_apart_go_back(tmp_path: Path) -> None:
    """No order of this can come of a shard that applies only what all hold."""
    begins = begun(tmp_path, (8, 6), last=decided(4), ahead=AHEAD)
    assert all(not begin.keep for begin in begins)


def test_another_generation_of_the_same_shards_begins_with_their_versions_of_now(
    tmp_path: Path,
) -> None:
    told: list[Command] = []
    run = make_run(tmp_path, shards=2, mode="sync", replicas=2)
    with Store(tmp_path / "ledger.sqlite") as store:
        disk = QueuedDisk(run)
        generations = Generations(run, store, disk, lambda _, c: told.append(c), lambda: None)
        for shard in range(2):
            generations.formation.stands(shard, HeldState(10 + shard, 1, True, 4))
        assert generations.form_if_due()
        for shard in range(2):
            generations.begun(shard, HeldReport(HeldState(10 + shard, 2, True, 4), {}, {}))
        store.put_ahead(RoundsAhead((decided(4, 2), decided(5, 2))))
        told.clear()
        generations.begin_again([6, 5])
        assert generations.again
        assert generations.form_if_due()
        assert [(c.keep, c.decision) for c in told if isinstance(c, Begin)] == [
            (True, decided(5, 2))
        ] * 2
        generations.begun(0, HeldReport(HeldState(10, 3, True, 6), {}, {}))
        assert generations.again
        generations.begun(1, HeldReport(HeldState(11, 3, True, 6), {}, {}))
        assert not generations.again
