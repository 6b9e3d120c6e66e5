"""Clusters of benchmarks that have no time to measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

import pytest

import benchmarks.cluster
from tests.e2e.cluster import launch


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts them as forks of a process that has imported TensorFlow."""

    def start(arguments: Sequence[str], output: IO[bytes]) -> object:
        return launch("coordinator", arguments, {}, output, output)

    monkeypatch.setattr(benchmarks.cluster, "start", start)
