"""Mistakes in a job file that are found without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.core.errors import InvalidData, InvalidJob, InvalidSetting
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look

HEAD = """
import keras
from worker import Csv, Job, Npz, setting
rows = setting("rows", 5)
"""
JOB = 'job = Job(model=build, train=Csv("data.csv", y="label"))\n'


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("label,x\n1,2\n")


def look(body: str, *settings: str, head: str = HEAD) -> None:
    Path("job.py").write_text(head + body)
    first_look(Path("job.py"), settings)


def test_a_job_file_is_not_run() -> None:
    look(f"raise SystemExit\n{JOB}", "rows=3", "epochs=2", "optimizer.momentum=0.9")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InvalidJob, match=r"there is no job file 'gone\.py'") as raised:
        first_look(Path("gone.py"))
    assert raised.value.code == "PS102"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("job = Job(", r"SyntaxError: '\(' was never closed \(job\.py, line 6\)"),
        ("  x = 3", r"IndentationError: unexpected indent \(job\.py, line 6\)"),
    ],
)
def test_a_file_that_is_no_python(body: str, said: str) -> None:
    with pytest.raises(UserCodeFailed, match=f"^job file job.py raised .*{said}") as raised:
        look(f"\n{body}")
    assert raised.value.code == "PS103"
    assert f'File "{Path("job.py").absolute()}", line 6' in raised.value.user_traceback


def test_a_file_that_is_no_text() -> None:
    with pytest.raises(InvalidJob, match=r"^the job file 'job.py' is no Python file"):
        look("\0")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("epohcs=3", "there is no epohcs; did you mean epochs?"),
        ("rosw=3", "there is no rosw; did you mean rows?"),
        ("optimizer_lr=1", "there is no optimizer_lr; did you mean optimizer"),
        ("validation_split=0.1", "there is no validation_split; eval= takes data of its own"),
        ("learning_rate=0.1", "--set optimizer.learning_rate=0.1"),
        ("lr=1", "there is no lr; did you mean optimizer.learning_rate?"),
        ("model=x", "model is code; change it in the job file"),
        ("epochs", "expected key=value"),
    ],
)
def test_a_key_that_is_neither_a_field_nor_a_setting_of_the_file(setting: str, said: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        look(JOB, setting)
    assert str(raised.value).startswith(f"--set {setting}: ")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "body",
    [
        "more = setting(name, 5)",
        "from worker import setting as ask",
        "import worker; ask = worker.setting",
        "import worker; ask = getattr(worker, 'sett' + 'ing')",
        "import some_package_of_theirs",
        "import importlib; helper = importlib.import_module('helper')",
        "from helper import rows",
        "import package.part",
        "import broken",
    ],
)
def test_settings_known_only_at_run_time_are_left_to_it(body: str) -> None:
    Path("helper.py").write_text("from worker import setting\nrows = setting('more', 5)\n")
    Path("broken.py").write_text("rows = (\n")
    Path("package").mkdir()
    Path("package/part.py").write_text("import worker\nrows = worker.setting('more', 5)\n")
    look(f"{body}\n{JOB}", "more=3")


def test_settings_of_the_users_own_modules_are_read_too() -> None:
    Path("helper.py").write_text("import json\nfrom worker import setting\nsetting('more', 5)\n")
    with pytest.raises(InvalidSetting, match="did you mean more"):
        look(f"import helper\n{JOB}", "mroe=3")


@pytest.mark.parametrize(
    "body",
    [
        'job = Job(model=build, train=Csv("gone.csv", y="label"))',
        'job = Job(model=build, train=Csv(path="gone.csv", y="label"))',
        'data = Csv("gone.csv", y="label")\njob = Job(model=build, train=data)',
    ],
)
def test_a_data_file_that_is_not_there(body: str) -> None:
    with pytest.raises(InvalidData, match=r"^train: Csv: there is no file 'gone\.csv'$") as raised:
        look(body)
    assert raised.value.code == "PS106"


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (f'open("gone.csv", "w")\n{JOB.replace("data", "gone")}', ()),
        (f'import numpy\nnumpy.savez("gone", x=1)\n{JOB.replace("data", "gone")}', ()),
        (f"import made_by_this\n{JOB.replace('data', 'gone')}", ()),
        (f"import subprocess\n{JOB.replace('data', 'gone')}", ()),
        (f"import os\nos.system('make')\n{JOB.replace('data', 'gone')}", ()),
        ('job = Job(train=Npz(f"{rows}.npz"))', ()),
        ('job = Job(train=Csv("s3://bucket/gone.csv"))', ()),
        ('def other():\n    job = Job(train=Csv("gone.csv"))', ()),
        ('data = Csv("gone.csv")\nif rows:\n    data = Csv("data.csv")\njob = Job(train=data)', ()),
        (f"import some_package_of_theirs\n{JOB.replace('data', 'gone')}", ()),
        (f'{JOB[:-2]}, eval=Csv("gone.csv"))', ("eval=none",)),
    ],
)
def test_a_file_that_may_come_to_be_is_left_to_the_run(
    body: str, settings: tuple[str, ...]
) -> None:
    Path("made_by_this.py").write_text('open("gone.csv", "w")\n')
    look(body, *settings)


def test_a_start_from_values_that_are_not_there() -> None:
    with pytest.raises(InvalidJob, match=r"^init_from is 'gone\.keras'; there is no such file"):
        look(JOB, "init_from=gone.keras")
    for value in ("none", "data.csv", "gs://bucket/gone.keras"):
        look(JOB, f"init_from={value}")
