"""What tests of several launchers share, and which process runs what in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.spark_engine import spark

_GROUPS = (
    ("test_kubernetes",),
    ("test_spark", "test_tune_spark"),
    ("test_ray",),
    ("test_slurm",),
    ("test_tune_chaos",),
)
"""Files that one process runs, one engine each; those that take longest come first. Others follow,
each by itself."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the groups in order, and marks them for ``--dist loadgroup``."""
    here = Path(__file__).parent
    places = {name: place for place, names in enumerate(_GROUPS) for name in names}
    ours = [item for item in items if item.path.parent == here]
    ours.sort(key=lambda item: places.get(item.path.stem, len(_GROUPS)))
    for item in ours:
        place = places.get(item.path.stem)
        name = item.path.stem if place is None else _GROUPS[place][0]
        item.add_marker(pytest.mark.xdist_group(name))
    items[:] = [item for item in items if item.path.parent != here] + ours


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session of Spark of three executors with one slot each."""
    with spark(tmp_path_factory.mktemp("spark")) as session:
        yield session
