from __future__ import annotations

import json
from typing import Any

import pytest

from psrpc import SOFTWARE
from psrpc.core.errors import InvalidJob, JobMismatch
from psrpc.files.description_file import DescriptionFile

FILE = DescriptionFile(("epochs=3", "replicas=2"), "sync", {"name": "tiny", "epochs": 3})


def changed(**changes: Any) -> bytes:
    return json.dumps({**FILE.to_json(), **changes}).encode()


def test_what_was_written_is_read() -> None:
    assert DescriptionFile.parse(changed(), "job.json") == FILE


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "job.json is no description of a job"),
        (b"[]", "an object"),
        (b'{"format": 1}', "software"),
        (changed(settings="epochs=3"), "settings"),
        (changed(mode=3), "mode"),
        (changed(description=[]), "description"),
    ],
)
def test_another_file_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidJob, match=why) as no:
        DescriptionFile.parse(data, "job.json")
    assert "`worker describe JOB -o job.json`" in str(no.value)


def test_a_file_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(JobMismatch, match=f"by version 0.0.9, this is {SOFTWARE}; ") as no:
        DescriptionFile.parse(changed(software="0.0.9"), "job.json")
    assert no.value.code == "PS131"
