"""Which rows the tables of a job begin with that starts from another one's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from tests.psrpc.rows import TABLES, VARIABLES, DictTable, plan_of, write_checkpoint
from worker.step import initializer
from worker.step.initializer import first_rows, source_of

NEW = replace(TABLES[1], name="new")


def job_of(source: Path | None) -> Any:
    return SimpleNamespace(init_from=source)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that the log says begin without rows."""
    tables: list[str] = []
    log = SimpleNamespace(
        warning=lambda _text, **said: tables.append(said["table"]),
        info=lambda _text, **_said: None,
    )
    monkeypatch.setattr(initializer, "log", log)
    return tables


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    held = [DictTable(spec, {}) for spec in TABLES]
    return write_checkpoint(tmp_path, plan_of(2), held, 10)


def test_those_of_the_same_name_and_width(
    checkpoint: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    relative = Path(checkpoint.name)
    assert first_rows(job_of(relative), plan_of(1)) == str(checkpoint)
    assert warned == []
    assert first_rows(job_of(relative), plan_of(1, (TABLES[0], NEW))) == str(checkpoint)
    assert warned == ["new"]
    assert first_rows(job_of(relative), plan_of(1, (NEW,))) == ""
    assert warned == ["new", "new"]


def test_of_a_run_those_of_its_newest_good_checkpoint(tmp_path: Path, warned: list[str]) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    held = [DictTable(spec, {}) for spec in TABLES]
    good, newest = (write_checkpoint(checkpoints, plan_of(2), held, step) for step in (10, 20))
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    job = job_of(tmp_path / "run")
    assert first_rows(job, plan_of(1)) == str(good)
    # It may go on meanwhile: values and rows are those of one checkpoint.
    write_checkpoint(checkpoints, plan_of(2), held, 30)
    assert first_rows(job, plan_of(1)) == str(good)
    assert warned == []


def test_a_path_that_is_neither_a_checkpoint_nor_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"neither a checkpoint \(it has no manifest.json\) nor"):
        source_of(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InvalidJob, match=r"init_from '.*': no good checkpoint in .*checkpoints"):
        source_of(tmp_path)


def test_another_width_names_the_table_and_both(checkpoint: Path) -> None:
    plan = plan_of(1, (replace(TABLES[0], width=8), NEW))
    with pytest.raises(InvalidJob, match=r"init_from '.*step-00000010': table 'user' has width 3 "):
        first_rows(job_of(checkpoint), plan)


def test_a_keras_file_has_none(tmp_path: Path, warned: list[str]) -> None:
    assert first_rows(job_of(tmp_path / "m.keras"), plan_of(1)) == ""
    assert warned == ["user", "items/new"]


def test_without_init_from_or_tables_there_is_nothing_to_say(
    tmp_path: Path, warned: list[str]
) -> None:
    assert first_rows(job_of(None), plan_of(1)) == ""
    assert first_rows(job_of(tmp_path), make_plan(VARIABLES, 1, "cut")) == ""
    assert warned == []
