"""The page of a study that has ended."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from coordinator.search.points import Space
from coordinator.search.space import log
from coordinator.search.trials import TrialValue
from coordinator.studies.ended import ended_page
from coordinator.tune.optuna_study import OptunaStudy, StudyRules
from psrpc.core.errors import InvalidArgument

SPACE = Space({"rate": log(1e-4, 0.1)})


def recorded(folder: Path, trials: int) -> None:
    """A study whose trials are complete, but the last one, which was under way."""
    pytest.importorskip("optuna")
    study = OptunaStudy(
        folder / "journal.log", "job", StudyRules(SPACE, "random", "none", "max", 0, 3)
    )
    for number in range(trials):
        rate = float(str(study.ask().point["rate"]))
        study.report(number, TrialValue(1, rate))
        if number < trials - 1:
            study.tell(number, "complete", rate)
    (folder / "study.json").write_text(
        json.dumps({"space": SPACE.to_json(), "metric": "max:accuracy"})
    )


def test_a_study_is_shown_from_its_files_which_stay_as_they_are(tmp_path: Path) -> None:
    recorded(tmp_path, 12)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    shown = ended_page(tmp_path).study()
    assert shown["name"] == tmp_path.name
    assert [each["phase"] for each in shown["trials"]] == ["complete"] * 11 + ["stopped"]
    assert shown["ended"] == "the command that has begun it goes on with it"
    assert shown["headline"].startswith("11 of 12 trials, 1 stopped, best accuracy 0.0")
    assert [key for key, _ in shown["importance"]] == ["rate"]
    assert [axis["key"] for axis in shown["axes"]] == ["rate"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_study_that_runs_has_a_page_already(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InvalidArgument, match="runs; its command has printed the address"):
            ended_page(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read"), ('{"metric": "max:a"}', "it has no 'space'")],
)
def test_a_description_that_cannot_be_read_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        ended_page(tmp_path)
