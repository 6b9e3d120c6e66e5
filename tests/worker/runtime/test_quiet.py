"""The import of TensorFlow, with something else in its place."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.runtime.quiet import import_tensorflow

TEXT = "import gc, os\nos.write(2, b'chatter')\nassert not gc.isenabled()\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that ``import tensorflow`` runs."""
    kept = sys.modules.pop("tensorflow", None)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "tensorflow.py"
    sys.modules.pop("tensorflow", None)
    if kept is not None:
        sys.modules["tensorflow"] = kept


def test_the_import_is_quiet_and_garbage_collection_pauses(
    module: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module.write_text(TEXT)
    import_tensorflow()
    assert gc.isenabled()
    assert capfd.readouterr() == ("", "")


def test_when_it_fails_what_it_said_is_shown(
    module: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module.write_text(TEXT + "raise ImportError('a library is missing')\n")
    with pytest.raises(ImportError, match="a library is missing"):
        import_tensorflow()
    assert gc.isenabled()
    assert capfd.readouterr() == ("", "chatter")
