"""Objects of the caller, saved to files for its own processes."""

from __future__ import annotations

import inspect
import linecache
import os
import stat
import subprocess
import sys
from pathlib import Path
from threading import Lock, RLock
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from psrpc.core.errors import AccessDenied, InvalidData
from worker.stored.objects import load_object, save_object

ROOT = Path(__file__).parents[3]


class Importable:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts


def saved(folder: Path, value: object) -> Path:
    path = folder / "made" / "object.pickle"
    save_object(path, value)
    return path


def test_a_class_of_a_module_goes_by_its_import_path(tmp_path: Path) -> None:
    path = saved(tmp_path, Importable(x=3))
    loaded = load_object(path)
    assert type(loaded) is Importable
    assert loaded.parts == {"x": 3}
    assert b"__init__" not in path.read_bytes()


@pytest.mark.parametrize("on_disk", [True, False])
def test_code_by_value_keeps_its_file_and_lines(on_disk: bool, tmp_path: Path) -> None:
    """The cells of a notebook are lines that only its own process has."""
    text = "def half(x):\n    return x / 2\n"
    name = str(tmp_path / "cell.py")
    if on_disk:
        Path(name).write_text(text)
    else:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType("a_notebook")
    exec(compile(text, name, "exec"), vars(module))
    path = saved(tmp_path, module.half)
    linecache.cache.pop(name, None)
    loaded = load_object(path)
    assert loaded is not module.half
    assert loaded(3.0) == 1.5
    assert inspect.getsource(loaded) == text


@pytest.mark.slow
def test_a_class_of_a_script_goes_by_value_and_a_module_beside_it_is_found(tmp_path: Path) -> None:
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    (scripts / "beside_it.py").write_text("class Neighbour:\n    value = 4\n")
    (scripts / "script.py").write_text(
        "from pathlib import Path\n"
        "from beside_it import Neighbour\n"
        "from worker.stored.objects import save_object\n"
        "class Own:\n"
        "    def sum(self): return 3 + Neighbour.value\n"
        f"save_object(Path({str(tmp_path / 'made' / 'object')!r}), Own())\n"
    )
    read = (
        "from pathlib import Path; from worker.stored.objects import load_object;"
        f"print(load_object(Path({str(tmp_path / 'made' / 'object')!r})).sum())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in ([str(scripts / "script.py")], ["-c", read]):
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not ran.returncode, ran.stderr
    assert ran.stdout == "7\n"


def test_only_the_owner_reads_file_and_directory(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", ["file", "directory"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_file_that_others_may_write_is_not_run(tmp_path: Path, part: str, mode: int) -> None:
    path = saved(tmp_path, 1)
    (path if part == "file" else path.parent).chmod(mode)
    with pytest.raises(AccessDenied, match=f"has mode 0{mode:o}, so other users.* chmod 0"):
        load_object(path)


def test_a_file_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, 1)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(AccessDenied, match="belongs to user"):
        load_object(path)


def test_a_link_to_another_file_is_not_followed(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path.parent / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        load_object(path.parent / "link")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    with pytest.raises(FileExistsError):
        save_object(path, 2)
    assert load_object(path) == 1


def test_readers_map_large_arrays_and_change_their_own(tmp_path: Path) -> None:
    large, small = np.arange(1 << 18), np.arange(5.0)
    path = saved(tmp_path, Importable(large=large, text=b"abc", small=small))
    one, other = load_object(path), load_object(path)
    assert one.parts["large"].ctypes.data % 64 == 0
    assert not one.parts["large"].flags.owndata
    one.parts["large"][:] = 0
    one.parts["small"][:] = 0
    for each in (other, load_object(path)):
        np.testing.assert_array_equal(each.parts["large"], large)
        np.testing.assert_array_equal(each.parts["small"], small)
    assert path.stat().st_size < 1.1 * large.nbytes


def test_a_lock_arrives_as_a_new_one(tmp_path: Path) -> None:
    lock = Lock()
    with lock:
        loaded = load_object(saved(tmp_path, Importable(lock=lock, again=RLock())))
    assert loaded.parts["lock"].acquire(blocking=False)
    assert loaded.parts["again"].acquire(blocking=False)


def test_what_cannot_be_saved_is_named_with_the_way_out(tmp_path: Path) -> None:
    with (
        Path(__file__).open("rb") as file,
        pytest.raises(
            InvalidData, match=r"Importable cannot be handed .*BufferedReader.*first use"
        ),
    ):
        saved(tmp_path, Importable(file=file))
    assert not list((tmp_path / "made").iterdir())
