"""Files of a run that only its owner may read, and secrets hidden from the job's own code."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.certificates.authority import certificates_of_run
from coordinator.certificates.members import member_of_run, revoke
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.launch.commands import UpOptions, cluster
from coordinator.process.describing import DescribeFailed, describe_job
from coordinator.process.settling import warn_of_key
from coordinator.records.notes import JobWarnings
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.security.peer_certificate import peer_of_pem

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("existing", [False, True])
def test_files_of_a_run_are_their_owners_alone(tmp_path: Path, existing: bool) -> None:
    names = ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"]
    if existing:
        # As an earlier version has left them, without an end.
        with Store(tmp_path / names[0]) as before:
            before.put("generation", 1)
            for name in names:
                (tmp_path / name).chmod(0o644)
            copies = {name: (tmp_path / name).read_bytes() for name in names}
        for name, content in copies.items():
            (tmp_path / name).write_bytes(content)
            (tmp_path / name).chmod(0o644)
        for name in ("job.json", "dashboard.json"):
            (tmp_path / name).write_text("{}\n")
    with RunDirectory(tmp_path, resume=False) as directory, Store(tmp_path / names[0]) as store:
        store.put("generation", 2)
        # The same as before: it is not written again.
        directory.write_job({})
        board = DashboardSnapshots("tiny", lambda: 0.0)
        board.open("run", tmp_path)
        found = {name: mode(tmp_path / name) for name in [*names, "job.json", "dashboard.json"]}
    assert set(found.values()) == {0o600}, found


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").touch(0o644)
    (tmp_path / "job.json").symlink_to("other")
    with RunDirectory(tmp_path, resume=False) as directory:
        directory.write_job({})
    assert mode(tmp_path / "other") == 0o644
    assert mode(tmp_path / "job.json") == 0o600


SPY = """
import os, sys
leads = [n for n, v in os.environ.items() if {certs!r} in v]
links = [os.readlink(f"/proc/self/fd/{{n}}") for n in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{{n}}")]
sys.stderr.write(repr((leads, [link for link in links if {certs!r} in link])))
sys.exit(1)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_code_of_the_job_gets_no_way_to_the_authoritys_key(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certificates_of_run(certs, "tiny", NOW)
    environment = {
        "PATH": os.environ["PATH"],
        "PSERVER_CERTS": str(certs),
        "PSERVER_TOKEN_FILE": str(certs / "token"),
        "PSERVER_CONFIG": str(certs / "config.toml"),
    }
    spy = SPY.format(certs=str(certs))
    with (certs / "ca.key").open("rb"), pytest.raises(DescribeFailed) as caught:
        asyncio.run(describe_job([sys.executable, "-c", spy], environment))
    assert str(caught.value) == "([], [])"


def test_workers_of_up_have_certificates_of_their_own(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certificates_of_run(certs, "tiny", NOW)
    options = UpOptions(
        job="job.py",
        shards=1,
        workers=2,
        run_dir=tmp_path,
        security=Security.from_options(Role.OPERATOR, certs),
    )
    made = {letter: member_of_run(certs, Role.WORKER, letter, NOW, DAY) for letter in "ab"}
    found = cluster(options, {}, cores=2, address="127.0.0.1:1")
    for letter, mine in made.items():
        assert mine == certs / f"worker-{letter}"
        assert f"--certs {mine}" in " ".join(found.members[f"worker-{letter}"].arguments)
        assert not any("ca.key" in str(path) for path in mine.iterdir())
        assert Security.from_options(Role.WORKER, mine).encrypted
    assert f"--certs {certs}" in " ".join(found.members["shard-0"].arguments).split(" --", 1)[1]


def test_they_are_kept_while_they_are_good(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certificates_of_run(certs, "tiny", NOW)

    def serial(now: datetime) -> str:
        made = member_of_run(certs, Role.WORKER, "a", now, DAY)
        return peer_of_pem((made / "worker.crt").read_bytes()).serial

    first = serial(NOW)
    assert serial(NOW + 300 * DAY) == first
    second = serial(NOW + 364 * DAY + timedelta(hours=1))
    assert second != first
    revoke(certs, "a", NOW)
    assert serial(NOW) not in (first, second)


@pytest.mark.parametrize(("where", "warned"), [("elsewhere", 1), ("certs", 0)])
def test_a_coordinator_says_that_the_authoritys_key_is_with_it(
    tmp_path: Path, where: str, warned: int
) -> None:
    """Unless the run has made its certificates itself, for this machine alone."""
    certs = tmp_path / where
    certificates_of_run(certs, "tiny", NOW)
    kept = JobWarnings()
    job_run: Any = SimpleNamespace(warnings=kept, run=SimpleNamespace(run_dir=tmp_path))
    security = Security.from_options(Role.COORDINATOR, certs)
    for _ in range(2):
        warn_of_key(job_run, security)
    assert len(kept.kept) == warned
    assert all(f"--certs {certs} holds ca.key" in warning for warning in kept.kept)
    (certs / "ca.key").unlink()
    kept.kept = []
    warn_of_key(job_run, security)
    assert not kept.kept
