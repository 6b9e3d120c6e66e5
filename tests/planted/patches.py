"""A planted bug: a patch of the source, the rule that it breaks, and who should catch it."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PACKAGES = ("psrpc", "pserver", "coordinator", "worker", "tests", "examples", "protos", "docs")
"""What a copy of the tree needs to run tests; ``benchmarks`` and the rest stay behind."""

_HEADER = re.compile(r"^(Breaks|Caught by): (.+)$", re.MULTILINE)


_CHANGED = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)


class BadPatch(Exception):
    """A patch says not what it should, or does not fit the source any more."""


@dataclass(frozen=True)
class Planted:
    """One patch.

    Attributes:
        rule: the rule that it breaks, in a sentence.
        catchers: pytest node ids, or ``sim FIRST..LAST`` for seeds of the simulator, with its
            flags before them. One of them failing is enough.
    """

    path: Path
    rule: str
    catchers: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def paths(self) -> list[str]:
        """The files that it changes."""
        return _CHANGED.findall(self.path.read_text())


def read(path: Path) -> Planted:
    """Reads the header of a patch, which stands before the first ``---``.

    Raises:
        BadPatch: it does not say what it breaks and who catches it.
    """
    head = path.read_text().partition("\n--- ")[0]
    said = _HEADER.findall(head)
    rules = [text for key, text in said if key == "Breaks"]
    catchers = tuple(text for key, text in said if key == "Caught by")
    if len(rules) != 1 or not catchers:
        raise BadPatch(
            f"{path.name} needs one line 'Breaks: ...' and one or more 'Caught by: ...'"
            " before the patch itself"
        )
    return Planted(path, rules[0], catchers)


def all_planted() -> list[Planted]:
    """Every patch beside this file, by name."""
    return [read(path) for path in sorted(HERE.glob("*.patch"))]


class Tree:
    """A copy of the source in which a patch can be planted and taken out again."""

    def __init__(self, directory: Path) -> None:
        """Copies the source to ``directory``, which must not exist."""
        self.directory = directory
        directory.mkdir(parents=True)
        for name in PACKAGES:
            shutil.copytree(ROOT / name, directory / name, ignore=_left_behind)
        shutil.copy(ROOT / "pyproject.toml", directory)

    def plant(self, planted: Planted) -> None:
        """Applies a patch. Raises BadPatch if the source has changed too much."""
        self._apply(planted)

    def take_out(self, planted: Planted) -> None:
        """Undoes :meth:`plant`."""
        self._apply(planted, "--reverse")

    def _apply(self, planted: Planted, *options: str) -> None:
        apply(planted, self.directory, *options)


def rebase(planted: Planted, directory: Path) -> None:
    """Writes a patch anew for the source in ``directory``, which has changed beside the lines that
    it takes out.

    Raises:
        BadPatch: these lines are no longer there; nothing is written.
    """
    text = planted.path.read_text()
    before = {path: (directory / path).read_text() for path in planted.paths}
    apply(planted, directory, "-C0")
    parts = [text.partition("\n--- ")[0] + "\n"]
    for path, old in before.items():
        new = (directory / path).read_text()
        old_lines, new_lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
        parts += difflib.unified_diff(old_lines, new_lines, f"a/{path}", f"b/{path}", n=1)
        (directory / path).write_text(old)
    planted.path.write_text("".join(parts))


def apply(planted: Planted, directory: Path, *options: str) -> None:
    """``git apply`` in ``directory``. Raises BadPatch with what git says."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, str(planted.path)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"GIT_CEILING_DIRECTORIES": str(directory.parent), "PATH": os.environ["PATH"]},
    )
    if done.returncode:
        raise BadPatch(f"{planted.name} does not fit the source: {done.stderr.strip()}")


def _left_behind(_directory: str, names: list[str]) -> set[str]:
    return {
        n for n in names if n in ("__pycache__", "node_modules", ".hypothesis", ".pytest_cache")
    }
