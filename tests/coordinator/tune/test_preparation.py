"""Job files whose text alone shows that a study cannot use them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.tune.preparation import check_search_name
from psrpc.core.errors import InvalidArgument


def job(folder: Path, *lines: str) -> Path:
    path = folder / "job.py"
    path.write_text("\n".join(["from pserver import space", "job = None", *lines]))
    return path


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (['serach = {"batch_size": space.choice(32, 64)}'], "serach"),
        (['space_of_job: dict = {"a": space.log(1, 2), "b": uniform(0, 1)}'], "space_of_job"),
        (['first = {"a": space.log(1, 2)}', 'searched = {"a": space.log(1, 2)}'], "searched"),
    ],
)
def test_a_space_under_another_name_is_named(tmp_path: Path, lines: list[str], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"has no `search`, and its `{name}` looks") as said:
        check_search_name(job(tmp_path, *lines), ())
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ('serach = {"batch_size": [32, 64]}',),
        ("serach = {}",),
        ('serach = {"a": space.log(1, 2)}', 'search = {"a": space.log(1, 3)}'),
        ('base = {"a": space.log(1, 2)}', "from siblings import spaces as search"),
    ],
)
def test_other_names_are_the_jobs_own(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "siblings.py").write_text("spaces = {}")
    check_search_name(job(tmp_path, *lines), ())
