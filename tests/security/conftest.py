"""Certificates of every kind, made once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.certificates.authority import make_certificates
from psrpc.security.identity import Role
from psrpc.security.revocation import CRL
from tests.security.forgery import Forgery
from tests.security.matrix import Cell, document

JOB = "tiny"


@dataclass
class Seen:
    """Results of calls, for the report: of servers with certificates, and with a token file."""

    roles: dict[Cell, str] = field(default_factory=dict)
    tokens: dict[Cell, str] = field(default_factory=dict)


SEEN = Seen()


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that ``coordinator certs init --job tiny`` makes."""
    directory = tmp_path_factory.mktemp("certs") / JOB
    make_certificates(directory, JOB, datetime.now(UTC))
    return directory


@pytest.fixture(scope="session")
def forgery(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Forgery:
    """Certificates that should not exist, for workers unless they say otherwise."""
    now = datetime.now(UTC)
    other = tmp_path_factory.mktemp("other") / "ca"
    make_certificates(other, JOB, now)
    return Forgery(certs, other, now - timedelta(days=30), Role.WORKER)


@pytest.fixture
def mine(certs: Path, tmp_path: Path) -> Path:
    """A copy to change, in which nothing was revoked."""
    copied = shutil.copytree(certs, tmp_path / "mine", ignore=shutil.ignore_patterns(CRL))
    return Path(copied)


def pytest_sessionfinish(session: pytest.Session) -> None:
    report: Path | None = session.config.getoption("--report")
    if report is not None and SEEN.roles and SEEN.tokens:
        report.write_text(document(SEEN.roles, SEEN.tokens))
