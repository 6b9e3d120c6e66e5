"""Options of a study: on the command line, in Python, and what they refuse before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from coordinator.search.space import choice, log
from coordinator.studies import cli, study
from coordinator.tune.options import TuneArguments, add_tune_arguments, time_limit_s, tune_arguments
from coordinator.tune.preparation import check_gpus, gpu_count, gpu_of
from psrpc.core.errors import InvalidArgument, InvalidJob


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-1s", "1w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected 90s, 30m, 2h or 1d"):
        time_limit_s(text)


def test_python_has_the_options_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    add_tune_arguments(parser)
    said = study._arguments(
        {"rate": log(1e-4, 0.1), "width": [32, 64], "kind": "choice(a, b)", "x": choice(-1, 1)},
        {
            "trials": 7,
            "sampler": "random",
            "timeout": "30m",
            "overrides": ["epochs=3", "mode=sync"],
            "insecure": True,
            "shm": False,
            "seed": -3,
            "replicas": None,
            "parallel": 1,
            "sbatch": {"account": "vision"},
        },
    )
    args = parser.parse_args(["job.py", *said])
    assert args.space == [
        "rate=log(0.0001, 0.1)",
        "width=choice(32, 64)",
        "kind=choice(a, b)",
        "x=choice(-1, 1)",
    ]
    assert (args.trials, args.sampler, args.timeout_s, args.seed) == (7, "random", 1800.0, -3)
    assert args.overrides == ["epochs=3", "mode=sync"]
    assert args.sbatch == ["account=vision"]
    assert (args.insecure, args.shm, args.replicas, args.parallel) == (True, False, None, 1)


@pytest.mark.parametrize(
    ("options", "where"),
    [({}, "127.0.0.1:0"), ({"dashboard": None}, None), ({"dashboard": "[::1]:80"}, "[::1]:80")],
)
def test_python_says_where_the_page_is(options: dict[str, Any], where: str | None) -> None:
    parser = argparse.ArgumentParser()
    add_tune_arguments(parser)
    said = parser.parse_args(["job.py", *study._arguments(None, options)])
    assert said.dashboard == where


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trails": 3}, "a study has no option 'trails'; did you mean 'trials'?"),
        ({"dashbord": None}, "a study has no option 'dashbord'; did you mean 'dashboard'?"),
        ({"trials": 0}, "trials is 0; expected"),
        ({"spark": 1, "on": "ray"}, "spark and on='ray' exclude each other"),
        ({"sampler": "bayes"}, "sampler is 'bayes'; expected tpe or grid or random or zip"),
        ({"shm": "no"}, "shm is 'no'; expected True or False"),
    ],
)
def test_python_refuses_before_anything_starts(options: dict[str, Any], words: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(InvalidArgument) as refused:
        study.tune("job.py", None, **options)
    assert str(refused.value).startswith(words)


def test_a_study_is_loaded_from_its_directory(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(InvalidArgument, match=r"holds no study \(it has no journal.log\)"):
        study.load_study(tmp_path)


def test_optuna_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "optuna" else name)
    monkeypatch.setattr("psrpc.ops.extras.find_spec", lambda name: name)
    with pytest.raises(InvalidJob, match=r"`coordinator tune` needs Optuna.*\[tune\]") as missing:
        cli.run(tune_arguments(["job.py"])[0])
    assert missing.value.code == "PS135"


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 1),
    ],
)
def test_visible_gpus_are_counted(environment: dict[str, str], count: int) -> None:
    assert gpu_count(environment) == count


def test_trials_share_no_gpu_unless_the_user_says_so() -> None:
    for options in (
        TuneArguments(parallel=2),
        TuneArguments(parallel=2, gpu="none"),
        TuneArguments(parallel=9, gpu_memory_fraction=0.1),
    ):
        check_gpus(options, 2)
    check_gpus(TuneArguments(parallel=3), 0)
    with pytest.raises(InvalidArgument, match="--parallel is 3, and the trials have 2 GPUs"):
        check_gpus(TuneArguments(parallel=3), 2)
    with pytest.raises(InvalidArgument, match="the trials share --gpu 1; say --parallel 1"):
        check_gpus(TuneArguments(parallel=2, gpu="1"), 2)
    assert [gpu_of(TuneArguments(), slot, 2) for slot in range(3)] == ["0", "1", "0"]
    assert gpu_of(TuneArguments(), 1, 0) == "auto"
    assert gpu_of(TuneArguments(gpu="none"), 1, 2) == "none"
