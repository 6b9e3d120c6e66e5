"""Settings that a job file takes from ``--set``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from psrpc.core.errors import InvalidJob
from worker.job.loader import load_job, only_while_loading, setting

JOB = """
import numpy as np
from worker import Arrays, Job, setting

records = setting("records", 4)
rate = setting("rate", 0.5)
data = setting("data", "")
shuffled = setting("shuffled", False)

job = Job(
    model=lambda: None, loss="mse", optimizer="sgd", batch_size=2,
    train=Arrays(np.full((records, 1), rate), np.zeros(records)),
)
seen = [records, rate, data, shuffled]
print(seen)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ([], "[4, 0.5, '', False]"),
        (["records=6", "epochs=2"], "[6, 0.5, '', False]"),
        (["records=6", " records = 8 ", "rate=2"], "[8, 2.0, '', False]"),
        (["data=a=b", "shuffled=true"], "[4, 0.5, 'a=b', True]"),
    ],
)
def test_a_job_file_asks_for_settings(
    job: Path, settings: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_job(job, settings)
    assert capsys.readouterr().out == seen + "\n"


def test_settings_of_the_job_and_of_the_file_stand_side_by_side(job: Path) -> None:
    loaded = load_job(job, ["records=6", "epochs=2", "optimizer.momentum=0.5"])
    assert (loaded.job.train.num_records, loaded.job.epochs) == (6, 2)
    assert loaded.optimizer_arguments == {"momentum": "0.5"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("records=many", "--set records=many: 'many' cannot be read; expected a whole number"),
        ("shuffled=1", "--set shuffled=1: '1' cannot be read; expected true or false"),
        ("data=", "--set data=: '' cannot be read; expected a name"),
        ("record=5", "--set record=5: there is no record; did you mean records?"),
        ("xyzzy=5", "known keys: data, rate, records, shuffled, loss"),
    ],
)
def test_a_setting_that_does_not_fit(job: Path, given: str, error: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        load_job(job, [given])
    assert error in str(raised.value)


def test_a_name_that_a_job_has_is_refused() -> None:
    for name in ("epochs", "optimizer.momentum"):
        with pytest.raises(InvalidJob, match="use another name"):
            setting(name, 1)


def test_without_a_job_file_the_default_counts(job: Path) -> None:
    load_job(job, ["records=6"])
    assert setting("records", 4) == 4


LATE = """
import numpy as np
from worker import Arrays, Job, setting

top = setting("top", 1)

def model():
    return setting("units", 1)

job = Job(model=model, loss="mse", optimizer="sgd", batch_size=2,
          train=Arrays(np.zeros((4, 1)), np.zeros(4)))
"""


@pytest.fixture
def late(tmp_path: Path) -> Path:
    path = tmp_path / "late.py"
    path.write_text(LATE)
    return path


def test_settings_that_a_function_reads_later_are_no_silent_default(late: Path) -> None:
    with only_while_loading():
        model = load_job(late, ["top=2"]).job.model
        says = r"setting\('units'\) is read after the job file was loaded; read it at the top of"
        with pytest.raises(InvalidJob, match=says):
            model()
        # Data is read in other threads.
        with ThreadPoolExecutor(1) as threads, pytest.raises(InvalidJob, match=says):
            threads.submit(model).result()
    assert load_job(late).job.model() == 1


def test_a_setting_that_is_read_too_late_is_not_said_to_be_missing(late: Path) -> None:
    says = r"--set units=7: setting\('units'\) is not read while the job file is loaded; read it at"
    with pytest.raises(InvalidJob, match=says) as raised:
        load_job(late, ["units=7"])
    assert raised.value.code == "PS104"
