"""Certificates of every kind, made once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.certs import make_certificates
from psrpc.identity import Role
from tests.security.forgery import Forgery

JOB = "tiny"

SEEN: dict[tuple[str, str], str] = {}
"""What came of a call of an RPC by somebody, for the report."""

HEAD = """# Who may call what

Made by `make matrix` from what real servers answered to real calls, see `tests/security`. ✓ let
through; ∅ let through, and told that there is no such thing; — no connection comes about; ? a
certificate of nobody; ✗ refused by name. After every refusal the server's state was compared with
that before: nothing had changed.

"""


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``coordinator certs init --job tiny`` makes."""
    directory = tmp_path_factory.mktemp("certs") / JOB
    make_certificates(directory, JOB, datetime.now(UTC))
    return directory


@pytest.fixture(scope="session")
def forgery(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Forgery:
    """Certificates that nobody should have, for workers unless they say otherwise."""
    now = datetime.now(UTC)
    other = tmp_path_factory.mktemp("other") / "ca"
    make_certificates(other, JOB, now)
    return Forgery(certs, other, now - timedelta(days=30), Role.WORKER)


def pytest_sessionfinish(session: pytest.Session) -> None:
    report: Path | None = session.config.getoption("--report")
    if report is not None and SEEN:
        report.write_text(HEAD + _table())


def _table() -> str:
    asked = list(dict.fromkeys(who for _, who in SEEN))
    callers = [who for who in asked if who not in set(Role)] + list(Role)
    rows = [["RPC", *callers], ["---"] * (1 + len(callers))]
    for rpc in sorted({rpc for rpc, _ in SEEN}):
        service, _, method = rpc.rpartition("/")
        name = f"{service.rpartition('.')[2]}.{method}"
        rows.append([f"`{name}`", *(SEEN.get((rpc, who), "") for who in callers)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
