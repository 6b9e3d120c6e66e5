"""``--description``: the job as another machine has described it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.process.describing import describe_patiently, known
from psrpc.core.errors import InvalidJob, JobMismatch
from psrpc.files.description_file import DescriptionFile
from tests.coordinator.builders import description_json
from tests.coordinator.fixtures import options

SOURCE = b"job = 1\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_bytes(SOURCE)
    return path


def given(
    job: Path, settings: tuple[str, ...] = (), mode: str | None = None, **changes: Any
) -> Path:
    """A file for ``job`` as ``worker describe`` writes it."""
    sha256 = hashlib.sha256(SOURCE).hexdigest()
    document = description_json(**{"job_sha256": sha256, **changes})
    path = job.with_suffix(".json")
    path.write_text(json.dumps(DescriptionFile(settings, mode, document).to_json()))
    return path


def test_it_takes_the_place_of_worker_describe(job: Path, tmp_path: Path) -> None:
    found = known(options(tmp_path / "run", job=job, description=given(job)))
    assert found is not None
    assert (found.name, found.epochs) == ("tiny", 2)


def test_it_is_bound_to_the_bytes_of_the_job_file(job: Path, tmp_path: Path) -> None:
    wanted = options(tmp_path / "run", job=job, description=given(job))
    job.write_bytes(SOURCE + b"# changed\n")
    with pytest.raises(
        JobMismatch, match=r"write it anew with `worker describe .*tiny\.py -o"
    ) as no:
        known(wanted)
    assert no.value.code == "PS132"


def test_it_was_made_with_the_same_settings(job: Path, tmp_path: Path) -> None:
    path = given(job, ("epochs=2", "replicas=2"), "sync")

    def start(**changes: Any) -> object:
        return known(options(tmp_path / "run", job=job, description=path, **changes))

    assert start(overrides=("epochs=2", "replicas=2"), mode="sync")
    assert start(overrides=("epochs=2",), replicas=2, mode="sync")
    with pytest.raises(InvalidJob) as no:
        start(overrides=("epochs=4",))
    assert str(no.value) == (
        f"--description {path} was made with --set epochs=2 --set replicas=2 --mode sync, and this "
        "coordinator has --set epochs=4; say the same to both"
    )


def test_a_description_is_checked_like_that_of_the_child(job: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="batch_size = 0; expected at least 1"):
        known(options(tmp_path / "run", job=job, description=given(job, batch_size=0)))
    with pytest.raises(InvalidJob, match=r"--description .*no\.json cannot be read: No such file"):
        known(options(tmp_path / "run", job=job, description=tmp_path / "no.json"))


def test_without_it_and_without_tensorflow_both_ways_out_are_named(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(InvalidJob) as no:
        asyncio.run(describe_patiently(options(tmp_path / "run", job=job)))
    assert no.value.code == "PS135"
    assert "pip install 'tf-pserver[tf]', or `worker describe " in str(no.value)
    assert str(no.value).endswith("--description job.json here")
