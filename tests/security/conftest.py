"""Certificates of every kind, made once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.certs import make_certificates
from psrpc.identity import Role
from tests.security.forgery import Forgery

JOB = "tiny"


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
