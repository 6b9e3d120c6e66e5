"""``--set key=value``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from psrpc.core.errors import InvalidJob
from tests.worker.job.test_job import make_job
from worker import Job
from worker.job.overrides import FIELDS, check_rounds, override_job, override_optimizer

SGD = {
    "class_name": "SGD",
    "config": {"learning_rate": 0.01, "momentum": 0.9, "nesterov": False, "clipnorm": None},
}
SCHEDULED = {
    "class_name": "SGD",
    "config": {
        "learning_rate": {
            "class_name": "CosineDecay",
            "config": {"initial_learning_rate": 0.01, "decay_steps": 100, "alpha": 0.0},
        }
    },
}


def test_every_field_is_known() -> None:
    assert set(FIELDS) == {field.name for field in fields(Job)}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("epochs=3", 3),
        ("batch_size = 7", 7),
        ("replicas=4", 4),
        ("replicas=none", None),
        ("seed=12", 12),
        ("engine=numpy", "numpy"),
        ("init_from=runs/a=b", "runs/a=b"),
        ("init_from=None", None),
        ("loss=mae", "mae"),
        ("optimizer=adam", "adam"),
        ("metrics=mae,mse", ("mae", "mse")),
        ("metrics=none", ()),
        ("eval=none", None),
        ("intra_op_threads=1", 1),
        ("checkpoint_every=50", 50),
        ("checkpoint_every=60s", "60s"),
        ("checkpoint_every=2m", "2m"),
        ("checkpoint_every=none", None),
        ("full_checkpoint_every=4", 4),
        ("keep_checkpoints=2", 2),
        ("keep_best=none", None),
        ("wire_dtype=bfloat16", "bfloat16"),
        ("compression=int8", "int8"),
        ("compression=none", None),
        ("topk=0.05", 0.05),
    ],
)
def test_a_field_is_read_by_its_kind(setting: str, value: Any) -> None:
    job, arguments = override_job(make_job(replicas=2, init_from="x"), [setting])
    assert getattr(job, setting.partition("=")[0].strip()) == value
    assert arguments == {}


@pytest.mark.parametrize("settings", [["replicas=4"], ["replicas=4", "mode=async"]])
def test_replicas_are_refused_where_no_mode_has_rounds(settings: list[str]) -> None:
    job, _ = override_job(make_job(), settings)
    with pytest.raises(InvalidJob, match="replicas is 4, and the job trains in mode async") as told:
        check_rounds(job, settings)
    assert told.value.code == "PS105"


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        (
            make_job(mode="ssp", staleness=1, then="sync", then_after=1, epochs=2, replicas=2),
            ["replicas=4"],
        ),
        (make_job(mode="sync", replicas=3), ["mode=async"]),
        (make_job(), ["replicas=none"]),
    ],
)
def test_replicas_that_mean_something_are_taken(job: Job, settings: list[str]) -> None:
    check_rounds(override_job(job, settings)[0], settings)


def test_settings_are_taken_together_and_the_last_of_a_key_counts() -> None:
    job, arguments = override_job(
        make_job(),
        ["mode=sync", "replicas=2", "replicas=5", "optimizer.learning_rate=0.5"],
    )
    assert (job.mode, job.replicas) == ("sync", 5)
    assert arguments == {"learning_rate": "0.5"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("epoch=3", "--set epoch=3: there is no epoch; did you mean epochs?"),
        ("batchsize=3", "did you mean batch_size?"),
        ("lerning_rate=0.1", "did you mean optimizer.learning_rate?"),
        ("qqq=1", "known keys: loss, optimizer"),
        ("epochs", "--set epochs: expected key=value"),
        ("=3", "expected key=value"),
        ("epochs=three", "--set epochs=three: 'three' cannot be read; expected a whole number"),
        ("epochs=1.5", "expected a whole number"),
        ("epochs=", "expected a whole number"),
        ("checkpoint_every=60x", "'60x' cannot be read; expected steps (500) or time with its"),
        ("checkpoint_every=0", "'0' cannot be read; expected steps (500) or time"),
        ("checkpoint_every=-1s", "'-1s' cannot be read; expected steps (500) or time"),
        ("epochs=0", "epochs is 0 (int); expected a whole number of at least 1"),
        ("replicas=many", "expected a whole number or none"),
        ("mode=fast", "mode is 'fast' (str); expected async or sync or ssp"),
        ("model=x", "--set model=x: model is code; change it in the job file"),
        ("train=x", "train is code"),
        ("eval=x", "expected none"),
        ("loss=", "expected a name"),
    ],
)
def test_a_bad_setting_names_key_value_and_fix(setting: str, says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        override_job(make_job(), [setting])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_plain_arguments_of_the_optimizer() -> None:
    changed = override_optimizer(
        SGD, {"learning_rate": "0.5", "momentum": "0", "nesterov": "True", "clipnorm": "2"}
    )
    assert changed["config"] == {
        "learning_rate": 0.5,
        "momentum": 0.0,
        "nesterov": True,
        "clipnorm": 2.0,
    }
    assert SGD["config"]["learning_rate"] == 0.01  # type: ignore[index]  # not changed in place
    override_optimizer(SGD, {"momentum": "0.1"})
    assert SGD["config"]["momentum"] == 0.9  # type: ignore[index]
    assert override_optimizer(changed, {"clipnorm": "none"})["config"]["clipnorm"] is None


def test_a_schedule_keeps_its_shape() -> None:
    changed = override_optimizer(SCHEDULED, {"learning_rate": "0.1"})
    assert changed["config"]["learning_rate"]["config"] == {
        "initial_learning_rate": 0.1,
        "decay_steps": 100,
        "alpha": 0.0,
    }


@pytest.mark.parametrize(
    ("argument", "text", "says"),
    [
        ("lr", "3", "there is no optimizer.lr; did you mean optimizer.learning_rate?"),
        ("momentun", "0.9", "there is no optimizer.momentun; did you mean optimizer.momentum?"),
        ("momentum", "high", "--set optimizer.momentum=high: 'high' cannot be read"),
        ("momentum", "nan", "expected a finite number"),
        ("learning_rate", "nan", "expected a finite number"),
        ("learning_rate", "inf", "expected a finite number"),
        ("learning_rate", "-1", "-1"),
        ("nesterov", "1", "expected true or false"),
    ],
)
def test_a_bad_argument_of_the_optimizer(argument: str, text: str, says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        override_optimizer(SGD, {argument: text})
    assert says in str(raised.value)
