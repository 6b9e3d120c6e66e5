"""The fixtures that tests of several launchers share, and the order of their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.spark_engine import spark

_ORDER = (
    "test_kubernetes",
    "test_spark",
    "test_ray",
    "test_tune_spark",
    "test_tune_chaos",
    "test_slurm",
)
"""Files in the order in which processes take them with ``--dist loadfile``: those that take longest
come first, others last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files in order."""
    here = Path(__file__).parent
    places = {name: place for place, name in enumerate(_ORDER)}
    ours = [item for item in items if item.path.parent == here]
    ours.sort(key=lambda item: places.get(item.path.stem, len(_ORDER)))
    items[:] = [item for item in items if item.path.parent != here] + ours


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session of Spark of three executors with one slot each."""
    with spark(tmp_path_factory.mktemp("spark")) as session:
        yield session
