"""When the fork server may fork; its protocol is in ``tests/psrpc/ops/test_fork_server.py``."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from psrpc.ops import process
from psrpc.ops.process import may_choose_devices
from worker.cli import fork_server
from worker.cli.fork_server import DESCRIBING, PRELOADED, import_difference, why_unsafe

CONTEXT = "tensorflow.python.eager.context"


def begun(monkeypatch: pytest.MonkeyPatch, context: object) -> None:
    """Whether TensorFlow is imported in this process depends on other tests."""
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, CONTEXT, SimpleNamespace(_context=context))


@pytest.mark.parametrize(
    "name", ["KERAS_BACKEND", "LC_ALL", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "TF_X", "TZ"]
)
def test_a_variable_of_an_import_must_be_the_same(name: str) -> None:
    for own, asked, words in (
        ({}, {name: "1"}, f"{name} was unset at the import and is '1'"),
        ({name: "1"}, {}, f"{name} was '1' at the import and is unset"),
        ({name: "1"}, {name: "2"}, f"{name} was '1' at the import and is '2'"),
        ({name: "1"}, {name: "1", "OTHER": "1"}, ""),
    ):
        assert import_difference(own, asked) == words


def test_a_long_value_is_cut() -> None:
    assert len(import_difference({}, {"TF_X": "x" * 100_000})) < 120


def test_a_process_with_a_runtime_or_a_gpu_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun(monkeypatch, None)
    assert why_unsafe() == ""
    begun(monkeypatch, object())
    assert why_unsafe() == "the import has begun TensorFlow's runtime"
    begun(monkeypatch, None)
    device = tmp_path / "nvidia0"
    monkeypatch.setattr(fork_server, "_GPU", re.compile(re.escape(str(device))))
    with device.open("w"):
        assert why_unsafe() == f"the import has opened {device}"
    assert why_unsafe() == ""


def test_devices_of_gpus_are_known() -> None:
    gpu = fork_server._GPU
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "kfd", "dri/renderD128"):
        assert gpu.fullmatch(f"/dev/{name}")
    assert not gpu.fullmatch("/dev/null")


def test_only_a_fork_that_has_not_begun_may_hide_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the user has imported TensorFlow for its own purposes."""
    begun(monkeypatch, None)
    assert not may_choose_devices()
    monkeypatch.setitem(process._preloaded, "here", True)
    assert may_choose_devices()
    begun(monkeypatch, object())
    assert not may_choose_devices()
    monkeypatch.delitem(sys.modules, "tensorflow")
    assert may_choose_devices()


def test_preloaded_modules_exist() -> None:
    assert [name for name in (*DESCRIBING, *PRELOADED) if find_spec(name) is None] == []


def test_the_environment_of_a_child_of_a_child_is_the_same() -> None:
    once = process.child_environment(dict(os.environ))
    assert process.child_environment(once) == once
