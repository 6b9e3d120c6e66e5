from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    consistency_accuracy,
    consistency_batches,
    consistency_divergence,
    consistency_staleness,
    consistency_stragglers,
)
from benchmarks.cluster import ROOT, RunFailed
from benchmarks.consistency import EXPERIMENTS, FIGURES, PAGE, parser
from benchmarks.experiment import Experiment, Figures, Found, Results, left, run
from benchmarks.milestones import Milestone, first_reached
from benchmarks.report import replace_section
from psrpc.core.policy import SETTINGS, Policy
from psrpc.v1 import coordinator_pb2 as pb


class Clock:
    """Stands still but for the ``steps`` that measuring takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def experiment(clock: Clock, takes_s: float, fails: Sequence[str] = ()) -> Experiment:
    def measure(name: str, small: bool) -> Figures:
        clock.now += takes_s
        if name in fails:
            raise RunFailed("it fell over")
        return {"small": small, "name": name}

    return Experiment(9, "none", 1, lambda _: "abc", measure, lambda _: "", lambda _, __: None)


def test_existing_results_are_not_run_again(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "results" / "some.json"
    tried = experiment(clock, 1.0)
    assert run(tried, Results(path), ["a", "b"], False, 100.0, clock)
    again = Results(path)
    assert again.found["a"] == {"small": False, "name": "a", "took_s": 1.0}
    assert list(left("abc", again.found, (), False)) == ["c"]
    assert list(left("abc", again.found, (), True)) == ["a", "b", "c"]
    assert list(left("abc", again.found, ("a", "c"), True)) == ["a", "c"]
    assert "machine" in json.loads(path.read_text())


def test_time_that_is_over_ends_it_between_runs(tmp_path: Path) -> None:
    clock, results = Clock(), Results(tmp_path / "some.json")
    assert not run(experiment(clock, 60.0), results, ["a", "b", "c"], False, 100.0, clock)
    assert list(results.found) == ["a", "b"]


def test_a_run_that_failed_is_a_miss_and_tried_again(tmp_path: Path) -> None:
    clock, results = Clock(), Results(tmp_path / "some.json")
    assert run(experiment(clock, 1.0, fails="a"), results, ["a", "b"], False, 100.0, clock)
    assert results.found["a"]["miss"] == "it fell over"
    assert list(left("ab", results.found, (), False)) == ["a"]


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: str(one.number))
def test_each_experiment_has_its_place_in_the_page(one: Experiment) -> None:
    page = PAGE.read_text()
    assert "TEXT" in replace_section(page, one.section, "TEXT")
    picture = f"consistency-{one.number}.png"
    assert (f"{FIGURES.name}/{picture}" in page) == (FIGURES / picture).exists(), "no dead links"
    assert one.names(True)
    assert len(set(one.names(False))) == len(one.names(False))


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: str(one.number))
def test_nothing_found_makes_an_empty_table(one: Experiment) -> None:
    assert one.table({}).startswith(("|", "Workers"))


def test_every_policy_that_is_run_is_one() -> None:
    for settings in (
        *consistency_stragglers.POLICIES.values(),
        *(row.settings for row in consistency_accuracy.POLICIES.values()),
        *consistency_divergence.POLICIES.values(),
    ):
        given = dict(setting.split("=", 1) for setting in settings)
        if "then" not in given:
            Policy(**{k: _value(v) for k, v in given.items() if k in SETTINGS})


def _value(text: str) -> Any:
    return json.loads(text) if text in ("true", "false") or text.isdecimal() else text


def test_the_page_names_every_setting() -> None:
    page = PAGE.read_text()
    for name in (*SETTINGS, "local_steps", "scale_lr", "warmup_epochs", "then", "then_after"):
        assert f"`{name}" in page, name


def test_a_straggler_is_compared_with_the_barrier_that_has_none() -> None:
    found = {
        "sleep/barrier/even": {"examples_per_s": 800.0, "stragglers": []},
        "sleep/barrier/slowed": {"examples_per_s": 480.0, "stragglers": []},
        "sleep/barrier + speculation/slowed": {
            "examples_per_s": 600.0,
            "stragglers": ["worker-1 takes 5 times as long as the median"],
        },
    }
    assert consistency_stragglers.ratio(found, "sleep", "barrier") == pytest.approx(0.6)
    table = consistency_stragglers.table(found)
    assert "| barrier + speculation | – | 600 | 75% (≥ 70%, met) |" in table
    assert "worker-1 takes 5 times" in table
    assert "| async | – | – | – |" in table


def test_the_first_checkpoint_that_will_do_counts() -> None:
    accuracies = {"c": 0.99, "b": 0.971, "a": 0.9}
    checkpoints = [(30, 12.5, Path("c")), (20, 11.0, Path("b")), (10, 10.5, Path("a"))]
    looked: list[str] = []

    def evaluate(path: Path) -> float:
        looked.append(path.name)
        return accuracies[path.name]

    found = first_reached(checkpoints, 10.0, 0.97, evaluate)
    assert found == Milestone(20, 1.0, 0.971, 2)
    assert looked == ["a", "b"]
    assert first_reached(checkpoints, 10.0, 0.995, evaluate) is None


def test_time_and_steps_are_means_over_the_seeds_that_got_there() -> None:
    def figures(reached: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "reached": reached,
            "accuracy": 0.98,
            "examples_per_s": 5000.0,
            "mean_staleness": 0.0,
            "staleness": [4, 2, 0],
        }

    found = {
        "sync/0": figures({"step": 100, "seconds": 10.0}),
        "sync/1": figures({"step": 200, "seconds": 14.0}),
        "sync/2": figures(None),
    }
    row = consistency_accuracy.table(found).splitlines()[-1]
    assert row.startswith("| sync | 12 ± 2 | 150 ± 50 | 450 ± 150 | 1 of 3 | 0.9800 ± 0.0000 |")
    assert consistency_accuracy.histogram(list(found.values())) == [12, 6]


def test_a_warning_counts_when_it_was_first_seen() -> None:
    watched = consistency_divergence.Watched()
    for batches, warnings in (
        (5, []),
        (40, ["gradients are stale"]),
        (90, ["gradients are stale"]),
    ):
        watched.note(
            pb.GetJobStatusResponse(
                phase="training", batches=batches, loss=batches / 10, warnings=warnings
            )
        )
    assert watched.figures() == {
        "warned": [[40, "gradients are stale"]],
        "loss": [(5, 0.5), (40, 4.0), (90, 9.0)],
    }


def test_a_diverged_run_says_what_status_had_said() -> None:
    failed = {
        "phase": "failed",
        "reason": "training diverged",
        "accuracy": None,
        "train_s": 3.0,
        "batches": 700,
        "mean_staleness": 2.0,
        "warned": [[300, "it will diverge"]],
    }
    table = consistency_divergence.table({"async": failed})
    assert "| async | stopped by the guard | – |" in table
    assert "- async, after 300 batches: it will diverge" in table
    assert "- async, at the end: training diverged" in table


def test_means_of_seeds_go_with_their_spread() -> None:
    found: Found = {
        "async/8/0.03/0": {"accuracy": [0.5, 0.9]},
        "async/8/0.03/1": {"accuracy": [0.5, 0.8]},
        "async/8/0.03/2": {"miss": "it fell over"},
    }
    assert consistency_staleness.accuracies(found, "async", 8, 0.03) == [0.9, 0.8]
    assert "| async | 0.8500 ± 0.0500 | – | – | – |" in consistency_staleness.table(found)
    assert "- async/8/0.03/2: it fell over" in consistency_staleness.table(found)


def test_one_micro_batch_has_no_recipe() -> None:
    names = consistency_batches.names(False)
    assert not [name for name in names if name.startswith(("linear/1/", "warmup/1/"))]
    found = {"plain/1/0": {"accuracy": [0.98]}, "warmup/4/0": {"accuracy": [0.97]}}
    rows = consistency_batches.table(found).splitlines()
    assert rows[2] == "| 64 | 1 | 0.9800 | 0.9800 | 0.9800 |"
    assert rows[3] == "| 256 | 4 | – | – | 0.9700 |"


def test_small_figures_stay_out_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.consistency import main

    with pytest.raises(SystemExit):
        main(["--small", "--docs"])
    assert "do not go into the page" in capsys.readouterr().err


def test_all_experiments_are_run_by_default() -> None:
    options: argparse.Namespace = parser().parse_args([])
    assert options.only == [1, 2, 3, 4, 5]
    assert PAGE == ROOT / "docs" / "consistency.md"
