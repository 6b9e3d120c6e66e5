"""A mistyped path: the entry that it probably means is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.files.urls import similar_path


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("jobs/mnist_dn.py", "; did you mean jobs/mnist_dnn.py?"),
        ("jobs/something_else", ""),
        ("job/mnist_dnn.py", ""),
        ("job", "; did you mean jobs?"),
        ("", ""),
    ],
)
def test_the_most_similar_entry_is_named(
    typed: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    for name in ("mnist_dnn.py", "notes.md"):
        (tmp_path / "jobs" / name).touch()
    monkeypatch.chdir(tmp_path)
    assert similar_path(Path(typed)) == hint
