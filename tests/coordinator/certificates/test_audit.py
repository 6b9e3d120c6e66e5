"""The audit log: who changed what, in a file that costs the job nothing."""

from __future__ import annotations

import json
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.certificates import audit as audit_module
from coordinator.certificates.audit import (
    A_MINUTE,
    AUDIT,
    KEPT,
    AuditLog,
    Paces,
    append,
    entry,
    read_audit,
)
from coordinator.certificates.authority import make_certificates
from coordinator.certificates.members import revoke
from coordinator.cli.__main__ import main
from coordinator.client.client import CoordinatorClient
from psrpc import SOFTWARE
from psrpc.core.errors import NotReady
from psrpc.core.names import CERTS
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.security.peer_certificate import Peer, peer_of_pem
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import SHA, make_run, serving

JOB = "tiny"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BAD = Peer(name="bad", fingerprint="ab" * 32, serial="7")


def worker_of(incarnation: int) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(
        incarnation=incarnation,
        host="h\x1b",
        pid=1,
        job_sha256=SHA,
        software=SOFTWARE,
        secret=bytes(32),
    )


def test_changes_are_logged_with_the_identity_of_the_caller(tmp_path: Path) -> None:
    certs = tmp_path / CERTS
    make_certificates(certs, JOB, datetime.now(UTC))
    coordinator = Security.from_options(Role.COORDINATOR, certs)
    (tmp_path / "run").mkdir()
    run = make_run(tmp_path / "run")
    path = run.run_dir / AUDIT
    with (
        AuditLog(path, lambda: NOW) as audit,
        serving(run, security=coordinator, audit=audit) as at,
    ):
        coordinator.revocations.on_revoked = lambda serials: audit.note("revoked", serials=serials)
        clients = {
            role: CoordinatorClient(at.address, Security.from_options(role, certs))
            for role in (Role.WORKER, Role.SHARD, Role.OPERATOR)
        }
        clients[Role.SHARD].register_shard(
            pb.RegisterShardRequest(
                shard=0, incarnation=7, address="127.0.0.1:1", host="h", software=SOFTWARE
            )
        )
        found = clients[Role.WORKER].register_worker(worker_of(8))
        # What is refused changes nothing.
        with pytest.raises(NotReady):
            clients[Role.OPERATOR].set_policy(["mode=ssp", "staleness=4"])
        serials = revoke(certs, "reader", datetime.now(UTC))
        clients[Role.WORKER].leave_worker(
            pb.LeaveWorkerRequest(session=found.session, reason="I\x1b[2J quit", fatal=True)
        )
        for client in clients.values():
            client.close()
    lines = list(read_audit(path))
    assert [line["what"] for line in lines] == [
        "RegisterShard",
        "RegisterWorker",
        "revoked",
        "LeaveWorker",
    ]
    shard, registered, revoked, left = lines
    peer = peer_of_pem((certs / "worker.crt").read_bytes())
    assert (shard["role"], shard["at"]) == ("shard", "127.0.0.1:1")
    assert registered["time"] == "2026-01-02T03:04:05.000+00:00"
    who = ("name", "role", "serial", "fingerprint")
    assert [registered[key] for key in who] == ["worker", "worker", peer.serial, peer.fingerprint]
    assert registered["address"].startswith("ipv4:127.0.0.1:")
    assert (registered["worker"], registered["host"]) == (
        found.worker,
        "h\N{REPLACEMENT CHARACTER}",
    )
    assert revoked["serials"] == serials
    assert left["fatal"] == "I\N{REPLACEMENT CHARACTER}[2J quit"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_policy_is_noted(tmp_path: Path) -> None:
    from coordinator.rpc.servicer import Servicer

    class Engine:
        def set_policy(self, settings: Any) -> tuple[int, str]:
            return 2, ",".join(settings)

        async def restart_with(self, asked: dict[str, str]) -> dict[str, str]:
            return {**asked, "slices": "none"}

        class run:  # noqa: N801
            policy = 1

    class Context:
        def peer(self) -> str:
            return "ipv4:192.0.2.1:4711"

        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

    import asyncio

    engine: Any = Engine()
    with AuditLog(tmp_path / AUDIT, lambda: NOW) as audit:
        servicer = Servicer(engine, audit=audit)
        answers = [
            asyncio.run(servicer.SetPolicy(pb.SetPolicyRequest(settings=[one]), Context()))
            for one in ("mode=ssp", "dense=shards")
        ]
    line, restart = read_audit(tmp_path / AUDIT)
    assert answers[1] == pb.SetPolicyResponse(policy=1, restart=["dense=shards", "slices=none"])
    assert (restart["what"], restart["settings"]) == ("SetPolicy", ["dense=shards"])
    assert restart["restart"] == ["dense=shards", "slices=none"]
    assert restart["address"] == "ipv4:192.0.2.1:4711"
    assert (line["what"], line["settings"], line["policy"]) == ("SetPolicy", ["mode=ssp"], 2)
    assert line["address"] == "ipv4:192.0.2.1:4711"
    assert "fingerprint" not in line


def test_the_commands_for_certificates_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs = str(tmp_path / CERTS)
    assert main(["certs", "init", certs]) == 0
    assert main(["certs", "add", certs, "worker", "gpu-7"]) == 0
    assert main(["certs", "renew", certs]) == 0
    assert main(["certs", "revoke", certs, "gpu-7"]) == 0
    capsys.readouterr()
    assert main(["audit", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["certs add", "certs renew", "certs revoke"]
    assert "user=" in lines[0]
    assert "certificate=gpu-7" in lines[0]
    assert main(["audit", certs, "--json"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3
    assert main(["audit", str(tmp_path / "nowhere")]) == 2
    assert stat.S_IMODE((tmp_path / CERTS / AUDIT).stat().st_mode) == 0o600


def test_a_caller_that_repeats_itself_fills_no_file() -> None:
    paces = Paces()
    bad, good = ("RegisterWorker", "bad"), ("RegisterWorker", "good")
    written = [paces.admits(bad, 60.0 + i / 100) for i in range(1000)]
    assert written.count(0) == A_MINUTE
    assert set(written[A_MINUTE:]) == {None}
    assert paces.admits(good, 119.0) == 0
    # And the next that is written says how many were not.
    assert paces.admits(bad, 120.0) == 1000 - A_MINUTE
    assert paces.admits(bad, 120.0) == 0


def test_callers_without_number_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "CALLERS", 8)
    paces = Paces()
    assert [paces.admits((str(i),), 0.0) for i in range(9)] == [0] * 8 + [None]
    assert paces.admits(("0",), 0.0) == 0
    assert [paces.admits((str(i),), 0.0) for i in range(100)].count(0) == 8
    assert len(paces._unwritten) <= 8


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MOST_BYTES", 200)
    path = tmp_path / AUDIT
    for number in range(40):
        append(path, entry(NOW + timedelta(seconds=number), "x", number=number))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + KEPT
    assert all(file.stat().st_size <= 200 for file in files)
    numbers = [line["number"] for line in read_audit(path)]
    assert numbers == list(range(40))[-len(numbers) :]
    assert len(numbers) >= KEPT


def test_a_disk_that_refuses_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with AuditLog(tmp_path / "gone" / AUDIT, lambda: NOW) as audit:
        audit.note("x", BAD)
        audit.note("y", BAD)
    said = "".join(capsys.readouterr())
    assert said.count("the audit log cannot be written") == 1


def test_a_disk_that_hangs_holds_up_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, written = threading.Event(), []

    def hanging(_path: Path, line: dict[str, Any]) -> None:
        assert go_on.wait(30)
        written.append(line)

    monkeypatch.setattr(audit_module, "append", hanging)
    monkeypatch.setattr(audit_module, "QUEUE", 4)
    with AuditLog(tmp_path / AUDIT, lambda: NOW) as audit:
        for number in range(10):
            audit.note(f"x{number}", BAD)
        go_on.set()
        audit.stop()
        assert 4 <= len(written) <= 6
        assert audit._lost == 10 - len(written)


def test_a_line_that_was_cut_is_told_as_it_is(tmp_path: Path) -> None:
    (tmp_path / AUDIT).write_text('{"what": "x"}\n{"wha')
    assert list(read_audit(tmp_path / AUDIT)) == [{"what": "x"}, {"unreadable": '{"wha'}]
