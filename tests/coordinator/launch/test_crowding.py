"""Warnings on a machine that has no room for a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.launch import up
from coordinator.launch.restarts import Outcome
from coordinator.launch.supervisor import Supervisor
from coordinator.launch.up import crowded
from tests.coordinator.launch.test_up import parse

GB = 10**9


@pytest.mark.parametrize(
    ("shards", "workers", "cores", "free", "said"),
    [
        (2, 8, 2, 8 * GB, []),
        (2, 3, 1, GB, []),
        (
            *(8, 500, 64, 64 * GB),
            [
                "--workers 500 and --shards 8 take 131.7 GB of memory at least, and 64.0 GB are "
                "free; say fewer, or processes will be killed",
                "--workers 500 share 64 cores: more workers than cores train no faster, and each "
                "start takes seconds of one",
            ],
        ),
        (1, 5, 1, 8 * GB, ["--workers 5 share 1 core: more workers than cores train no faster"]),
        (1000, 1, 64, 8 * GB, ["--workers 1 and --shards 1000 take 78.9 GB of memory at least"]),
    ],
)
def test_a_shortage_is_reported(
    shards: int, workers: int, cores: int, free: int, said: list[str]
) -> None:
    found = crowded(shards, workers, cores, free)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_it_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").touch()
    monkeypatch.setattr("coordinator.launch.up.available_nbytes", lambda: GB)
    printed: list[str] = []

    def run(_: Supervisor) -> Outcome:
        printed.append(capsys.readouterr().out)
        return Outcome(2)

    monkeypatch.setattr(Supervisor, "run", run)
    assert up.run(parse("job.py", "--workers", "1000")) == 2
    assert "warning: --workers 1000 and --shards 1 take 262.2 GB of memory at least" in printed[0]
    assert "warning: --workers 1000 share " in printed[0]
