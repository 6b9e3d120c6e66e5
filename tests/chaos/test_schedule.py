"""Meaning of seeds, and detection by the witness model."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.policy import ASYNC, Policy
from tests.chaos.reference import Reference
from tests.chaos.schedule import GATE, LONGEST_S, STARTING, Kind, links, make_schedule
from tests.chaos.witness import (
    BATCH_SIZE,
    PAIRS,
    WITNESS,
    Array,
    Optimizer,
    Options,
    Torn,
    check_values,
    gradient,
    initial_values,
    optimizer_config,
)

OPTIONS = Options(
    policy=ASYNC,
    shards=2,
    workers=2,
    optimizer="sgd",
    epochs=2,
    batches=16,
    pairs=64,
    shm=True,
    checkpoint_every=5,
    pace_ms=0,
)


def trained(options: Options, batches: list[int]) -> dict[str, Array]:
    """The whole arenas after ``batches``, one after another, on every shard."""
    plan, values = options.plan, initial_values(options)
    for shard in range(options.shards):
        cuts = {a.name: slice(a.cuts[shard], a.cuts[shard + 1]) for a in plan.arenas}
        engine = NumpyEngine(optimizer_config(options.optimizer), plan, shard)
        engine.load({name: array[cuts[name]].copy() for name, array in values.items()})
        for batch in batches:
            found = gradient(options, batch, shard, engine.snapshot()[WITNESS])
            if found is not None:
                engine.apply(found)
        for name, array in engine.snapshot().items():
            values[name][cuts[name]] = array
    return values


def test_a_seed_means_the_same_schedule_each_time() -> None:
    assert [make_schedule(seed) for seed in range(50)] == [make_schedule(s) for s in range(50)]


def test_schedules_are_of_every_kind_and_keep_to_their_time() -> None:
    schedules = [make_schedule(seed) for seed in range(400)]
    faults = [fault for schedule in schedules for fault in schedule.faults]
    kinds = {fault.kind for fault in faults}
    assert kinds == set(get_args(Kind))
    assert any(fault.step == STARTING for fault in faults)
    assert any(not schedule.faults for schedule in schedules)
    hosted = [make_schedule(seed, hosted=True) for seed in range(100)]
    for options in (schedule.options for schedule in hosted):
        assert options.policy.rounds
        assert len(options.shard_names) == options.slices == options.shards * options.rows
        assert options.shards <= options.workers
        assert options == Options.from_json(options.to_json())
    assert 20 < sum(schedule.options.rows for schedule in hosted) < 60
    assert any(schedule.options.rows for schedule in hosted[:3])
    for schedule in schedules + hosted:
        assert sum(fault.after_s + fault.lasts_s for fault in schedule.faults) < LONGEST_S
        places = {"coordinator", *schedule.options.shard_names, *schedule.options.worker_names}
        for fault in schedule.faults:
            of_processes = fault.kind in ("kill", "drain", "stop", "replace")
            known = places if of_processes else links(schedule.options)
            assert set(fault.targets) <= set(known)
            # The gate is still closed then, so the job cannot end before.
            assert fault.step < GATE * schedule.options.total_steps


def test_schedules_have_every_policy_and_change_it_while_processes_die() -> None:
    schedules = [make_schedule(seed) for seed in range(400)]
    policies = [schedule.options.policy for schedule in schedules]
    assert {policy.mode for policy in policies} == {"async", "sync", "ssp"}
    assert any(policy.backups for policy in policies)
    assert any(policy.speculate for policy in policies)
    assert any(policy.max_staleness is not None for policy in policies)
    changing = [schedule for schedule in schedules if schedule.options.change is not None]
    assert any(
        fault.kind == "kill" and fault.step == schedule.options.change_step
        for schedule in changing
        for fault in schedule.faults
    )
    for schedule in changing:
        # The witness has to know what a gradient is divided by.
        change = schedule.options.change
        assert change is not None
        assert schedule.options.policy.taken == change.taken == 1
        assert schedule.options == Options.from_json(schedule.options.to_json())


def test_jobs_of_every_policy_and_optimizer_have_tables() -> None:
    found = [s.options for s in map(make_schedule, range(400)) if s.options.rows]
    assert 100 < len(found) < 220
    assert {options.policy.mode for options in found} == {"async", "sync", "ssp"}
    assert {options.optimizer for options in found} == {"sgd", "momentum", "adam"}
    assert len({(options.shm, options.data) for options in found}) == 4
    for options in found:
        assert options == Options.from_json(options.to_json())
        assert [table.name for table in options.plan.tables] == ["growing", "fixed"]


def test_workers_of_jobs_of_either_mode_have_several_devices() -> None:
    found = [s.options for s in map(make_schedule, range(400)) if s.options.devices > 1]
    assert 60 < len(found) < 200
    assert {options.policy.mode for options in found} == {"async", "sync"}
    assert {options.devices for options in found} == {2, 3}
    assert any(options.policy.backups for options in found)
    assert any(options.policy.speculate for options in found)
    for options in found:
        assert options == Options.from_json(options.to_json())
        assert not options.rows


def test_without_a_disk_none_is_filled() -> None:
    schedules = [make_schedule(seed, disk=False) for seed in range(200)]
    assert not any(f.kind == "full" for s in schedules for f in s.faults)


def test_each_shard_has_an_equal_piece() -> None:
    for shards in (1, 2, 3):
        options = replace(OPTIONS, shards=shards)
        for arena in options.plan.arenas:
            assert len({arena.shard_length(shard) for shard in range(shards)}) == 1
        assert options.plan.arenas[0].length == shards * options.piece


def test_batches_are_counted_over_epochs() -> None:
    assert OPTIONS.number(BatchId(0, 0, BATCH_SIZE)) == 0
    assert OPTIONS.number(BatchId(1, BATCH_SIZE, BATCH_SIZE)) == OPTIONS.batches + 1


def test_every_batch_once_makes_ones() -> None:
    values = trained(OPTIONS, list(range(OPTIONS.total_batches)))
    check_values(OPTIONS, values, None)
    ones = values[WITNESS].reshape(2, -1)[:, : OPTIONS.total_batches]
    assert (ones == 1).all()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_pulls_after_training_are_not_torn(optimizer: Optimizer) -> None:
    options = replace(OPTIONS, optimizer=optimizer)
    check_values(options, trained(options, [3, 0, 5]), None)


def test_a_batch_twice_shows() -> None:
    with pytest.raises(Torn, match="batch 3 as 2"):
        check_values(OPTIONS, trained(OPTIONS, [3, 0, 3]), None)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_two_versions_in_one_piece_show(optimizer: Optimizer) -> None:
    options = replace(OPTIONS, optimizer=optimizer)
    old, new = trained(options, [3, 0]), trained(options, [3, 0, 5])
    for size in (1, options.pairs, options.pairs + 1):
        mixed = {name: array.copy() for name, array in old.items()}
        mixed[PAIRS][:size] = new[PAIRS][:size]
        with pytest.raises(Torn, match="shard 0: the pairs"):
            check_values(options, mixed, None)


def test_two_arenas_of_two_versions_show() -> None:
    mixed = trained(OPTIONS, [3, 0]) | {PAIRS: trained(OPTIONS, [3, 0, 5])[PAIRS]}
    with pytest.raises(Torn, match="2 batches and 3 updates"):
        check_values(OPTIONS, mixed, None)


def test_two_shards_of_two_rounds_show() -> None:
    options = replace(OPTIONS, policy=Policy(mode="sync", replicas=1))
    old, new = trained(options, [0, 1]), trained(options, [0, 1, 2])
    check_values(options, new, 3)
    with pytest.raises(Torn, match="shard 0 at round 2 differs"):
        check_values(options, new, 2)
    mixed = {
        name: np.concatenate([np.split(old[name], 2)[0], np.split(new[name], 2)[1]]) for name in old
    }
    with pytest.raises(Torn, match="shard 1 at round 2"):
        check_values(options, mixed, 2)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_reference_has_every_batch_once(replicas: int) -> None:
    options = replace(OPTIONS, policy=Policy(mode="sync", replicas=replicas))
    states = Reference(options).run()
    values = {
        arena.name: np.concatenate([state.values[arena.name] for state in states])
        for arena in options.plan.arenas
    }
    check_values(options, values, options.total_steps)


def test_a_poisoned_batch_is_left_out() -> None:
    options = replace(OPTIONS, policy=Policy(mode="sync", replicas=2), poisoned=5)
    states = Reference(options).run()
    ones = states[0].values[WITNESS][: options.total_batches]
    assert np.flatnonzero(ones == 0).tolist() == [5]
    assert set(ones) == {0, 1}
