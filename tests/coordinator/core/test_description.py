"""The job's description: what the child prints, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.description import PolicyChange, check_for_shards
from coordinator.core.description_reader import parse_description
from coordinator.process.describing import DescribeFailed, describe_command, describe_job
from psrpc.checkpoint.checkpoint_every import SaveInterval
from psrpc.core.errors import InvalidJob
from psrpc.core.policy import Policy
from tests.coordinator.builders import TABLE, describe, description_json


def test_a_description_is_read() -> None:
    description = describe(mode="sync", replicas=3)
    assert (description.name, description.mode, description.replicas) == ("tiny", "sync", 3)
    assert [v.shape for v in description.variables] == [(8, 8), (8,)]
    assert describe().replicas == 0
    assert describe(checkpoint_every=9).checkpoint_every == SaveInterval(steps=9)
    assert describe(checkpoint_every="2m").checkpoint_every == SaveInterval(seconds=120.0)
    assert describe(checkpoint_every=None).checkpoint_every == SaveInterval(1000, 60.0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": 2}, "not of format 1"),
        ({"mode": "odd"}, "mode is 'odd'; expected async or sync or ssp"),
        ({"mode": "sync"}, "mode is 'sync' but replicas is not set"),
        ({"batch_size": 0}, "batch_size = 0; expected at least 1"),
        ({"epochs": True}, "epochs = True; expected int"),
        ({"train_records": "many"}, "train_records = 'many'; expected int"),
        ({"variables": [{"name": "w"}]}, r"the variable \{'name': 'w'\}"),
        ({"wire_dtype": "half"}, "wire_dtype = 'half'; expected float32 or bfloat16 or float16"),
        ({"placement": "odd"}, "placement = 'odd'; expected cut or whole"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidJob, match=what):
        describe(**changes)


def test_a_batch_that_is_larger_than_the_data_is_remarked_on() -> None:
    [said] = describe(batch_size=12, train_records=10).remarks
    assert said == (
        "batch_size is 12, and train holds 10 records: each epoch is one batch of all of them"
    )
    assert describe(batch_size=10, train_records=10).remarks == []


@pytest.mark.parametrize("every", [0, "60", "60x", "-1s", True])
def test_an_interval_of_checkpoints_that_is_none_is_named(every: object) -> None:
    with pytest.raises(InvalidJob, match=r"has checkpoint_every = .*; expected steps \(500\)"):
        describe(checkpoint_every=every)


def test_a_rule_and_the_size_of_a_batch_are_read() -> None:
    description = describe()
    assert (description.then, description.unit, description.per_epoch) == (None, 4, 3)
    assert (description.scale_lr, description.warmup_epochs) == (None, 0.0)
    ssp = {"mode": "ssp", "staleness": 2}
    rule = {"policy": ssp, "epoch": 1}
    description = describe(then=rule, local_steps=2, scale_lr="linear", warmup_epochs=0.5)
    assert description.then == PolicyChange(Policy(mode="ssp", staleness=2), 1)
    assert (description.unit, description.per_epoch) == (8, 2)
    assert (description.scale_lr, description.warmup_epochs) == ("linear", 0.5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"then": {"policy": {"mode": "async"}}}, "has then = "),
        ({"then": {"policy": {"mode": "async"}, "epoch": 2}}, "after epoch 2; expected .* 2 epoch"),
        ({"then": {"policy": {"mode": "async"}, "epoch": 0}}, "after epoch 0"),
        ({"then": {"policy": {"mode": "odd"}, "epoch": 1}}, "mode is 'odd'"),
        ({"local_steps": 0}, "local_steps = 0; expected at least 1"),
        ({"local_learning_rate": "0.1"}, "local_learning_rate is '0.1'; expected a number"),
        ({"scale_lr": "square"}, "scale_lr = 'square'; expected linear"),
        ({"warmup_epochs": -1.0}, "warmup_epochs = -1.0; expected a number of at least 0"),
    ],
)
def test_a_rule_or_rate_that_is_wrong_is_named(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidJob, match=what):
        describe(**changes)


def test_text_that_is_no_json_is_shown() -> None:
    with pytest.raises(InvalidJob, match="printed 'hello', which is not JSON"):
        parse_description("hello")


def test_replicas_come_last_so_that_they_win() -> None:
    command = describe_command(Path("j.py"), "sync", 4, ["epochs=1", "replicas=2"])
    assert command[1:] == [
        *("-P", "-m", "worker.cli", "describe", "j.py", "--mode", "sync"),
        *("--set", "epochs=1", "--set", "replicas=2", "--set", "replicas=4"),
    ]


def run_child(program: str) -> Any:
    return asyncio.run(describe_job([sys.executable, "-c", program], {}))


def test_the_child_is_run_and_its_json_read() -> None:
    text = json.dumps(description_json())
    assert run_child(f"import sys; print({text!r}); print('noise', file=sys.stderr)").name == "tiny"


def test_the_childs_own_words_are_passed_on() -> None:
    with pytest.raises(DescribeFailed, match=r"Traceback\n  user.py\nerror: batch_size is 0$"):
        run_child("raise SystemExit('Traceback\\n  user.py\\nerror: batch_size is 0')")
    with pytest.raises(DescribeFailed, match=r"^my \uFFFD\[2Jerror$"):
        run_child("raise SystemExit('my \\x1b[2Jerror')")
    with pytest.raises(DescribeFailed, match=r"^error: .* exit status 3 and no word"):
        run_child("raise SystemExit(3)")


def test_an_update_that_needs_one_shard_gets_one() -> None:
    description = describe(needs_single_shard="global_clipnorm is a norm over all variables")
    check_for_shards(description, 1)
    with pytest.raises(InvalidJob, match=r"cannot use 2 shards: global_clipnorm .*--shards 1"):
        check_for_shards(description, 2)


def test_a_description_of_before_is_of_an_exact_job() -> None:
    assert describe().exact
    assert not describe(exact=False).exact
    assert describe(exact=None).exact
    with pytest.raises(InvalidJob, match="exact"):
        describe(exact=1)


def test_slices_need_as_many_workers() -> None:
    hosted = describe(dense="allreduce")
    assert hosted.hosted
    check_for_shards(hosted, 2, 2)
    check_for_shards(hosted, 3)
    with pytest.raises(InvalidJob, match=r"3 slices of .* 2 workers to host.* say --shards 2"):
        check_for_shards(hosted, 3, 2)
    assert not describe().hosted
    check_for_shards(describe(), 3, 2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (3, 0)),
        ({"tables": [TABLE]}, (3, 0)),
        ({"dense": "allreduce"}, (3, 0)),
        ({"dense": "allreduce", "slices": 2}, (2, 0)),
        ({"dense": "allreduce", "tables": [TABLE]}, (4, 1)),
        ({"dense": "allreduce", "tables": [TABLE], "slices": 2}, (5, 2)),
    ],
)
def test_slices_follow_the_shards_that_have_rows(
    fields: dict[str, Any], expected: tuple[int, int]
) -> None:
    plan = describe(**fields).plan(3)
    assert (plan.shards, plan.slices) == expected


def test_the_number_of_slices_is_checked() -> None:
    beside = describe(dense="allreduce", tables=[TABLE])
    check_for_shards(beside, 3, 1)
    several = replace(beside, slices=3)
    with pytest.raises(InvalidJob, match=r"3 slices of .*\(slices\), and 2 workers .*slices=2$"):
        check_for_shards(several, 1, 2)
    with pytest.raises(InvalidJob, match="cannot use 3 slices: it has a norm; say slices=1"):
        check_for_shards(replace(several, needs_single_shard="it has a norm"), 1)
    check_for_shards(replace(beside, needs_single_shard="it has a norm"), 3)
    alone = describe(dense="allreduce", slices=2)
    for shards in (1, 2):
        check_for_shards(alone, shards, 2)
    with pytest.raises(InvalidJob, match=r"slices is 2 and --shards is 3: .* leave one of"):
        check_for_shards(alone, 3)


def test_only_workers_that_host_all_parameters_need_no_shard() -> None:
    hosted = describe(dense="allreduce")
    check_for_shards(hosted, 0, 1)
    assert hosted.plan(0) == hosted.plan(1)
    check_for_shards(replace(hosted, slices=2), 0, 2)
    with pytest.raises(InvalidJob, match=r"parameters need .* --shards 1, or have workers host"):
        check_for_shards(describe(), 0)
    with pytest.raises(InvalidJob, match=r"is 0, and the rows .* need a shard; say --shards 1$"):
        check_for_shards(describe(dense="allreduce", tables=[TABLE]), 0)
