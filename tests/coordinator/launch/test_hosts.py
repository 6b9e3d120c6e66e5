"""The processes of a job whose workers host the parameters, and their certificates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates.authority import RENEW_BEFORE, certificates_of_run
from coordinator.certificates.members import member_of_run
from coordinator.launch.hosts import needed
from psrpc.core.names import CERTS, JOB
from psrpc.security.credentials import Security
from psrpc.security.identity import Role

MEMBERS = ("shard-0", "shard-1", "worker-a")


def described(run_dir: Path, text: str) -> list[str]:
    (run_dir / JOB).write_text(text)
    return needed(MEMBERS, run_dir)


@pytest.mark.parametrize("text", ["{", "[]", '{"description": {}}', '{"description": 3}'])
def test_a_job_that_says_nothing_has_shards(tmp_path: Path, text: str) -> None:
    assert needed(MEMBERS, tmp_path) == list(MEMBERS)
    assert described(tmp_path, text) == list(MEMBERS)


def test_workers_have_the_certificate_of_a_shard_while_they_host_the_parameters(
    tmp_path: Path,
) -> None:
    now = datetime.now(UTC)
    certificates_of_run(tmp_path / CERTS, "job", now)
    own = member_of_run(tmp_path / CERTS, Role.WORKER, "a", now, RENEW_BEFORE)
    hosted, apart = (
        json.dumps({"description": {"dense": dense}}) for dense in ("allreduce", "shards")
    )
    assert described(tmp_path, hosted) == ["worker-a"]
    security = Security.from_options(Role.SHARD, own)
    assert security.common_name == "a"
    shown = (own / "shard.crt").read_bytes()
    assert described(tmp_path, hosted) == ["worker-a"]
    assert (own / "shard.crt").read_bytes() == shown
    beside = json.dumps({"description": {"dense": "allreduce", "tables": [{}]}})
    assert described(tmp_path, beside) == list(MEMBERS)
    assert (own / "shard.crt").read_bytes() == shown
    assert described(tmp_path, apart) == list(MEMBERS)
    assert not list(own.glob("shard*"))
    assert (own / "worker.key").exists()
