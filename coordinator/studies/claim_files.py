"""Prints files of runs as JSON. A pod with the claim of the runs gets the text of this module as a
program, since its image may have another version of the package: it imports nothing of that."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

HISTORY, JOB, SUMMARY = "history.csv", "job.json", "summary.json"
CURVES = "/tensorboard"
"""The end of the name of a directory whose files are printed as they are."""


def files_of(root: Path, asked: list[str]) -> str:
    """Returns a JSON object of files by directory and name.

    Args:
        root: of the run directories.
        asked: names of run directories, of which the history and the summary of an ended run count
            as text; or with :data:`CURVES` after it, of all files of that directory in base64.
    """
    found = {}
    for name in asked:
        run = root / name
        if name.endswith(CURVES):
            files = sorted(path for path in run.glob("*") if path.is_file())
            found[name] = {path.name: base64.b64encode(_read(path)).decode() for path in files}
            continue
        # A summary that is older belongs to an earlier start.
        has = [HISTORY] + [SUMMARY] * (0 < _written_ns(run / JOB) <= _written_ns(run / SUMMARY))
        found[name] = {each: _read(run / each).decode("utf-8", "replace") for each in has}
    return json.dumps(found)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    sys.stdout.write(files_of(Path(sys.argv[1]), sys.argv[2:]))
