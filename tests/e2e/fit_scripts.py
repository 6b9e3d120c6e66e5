"""Runs scripts of ``examples/fit``, each as ``__main__``, in this one process.

python -m tests.e2e.fit_scripts [--cluster=RUN_DIR] [--seed=N] SCRIPT...

Prints a line of JSON for each, ``{"script": ..., "metrics": {...}, "seconds": ...}``. With
``--cluster`` they run, as they are, inside of one entered cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras

import pserver


def run(script: Path, seed: int | None) -> dict[str, float]:
    """Returns what a script prints in its last line. ``seed`` stands for its own."""
    keras.backend.clear_session()
    said, seeded = io.StringIO(), keras.utils.set_random_seed
    with (
        contextlib.redirect_stdout(said),
        mock.patch.object(sys, "argv", [str(script)]),
        mock.patch.object(keras.utils, "set_random_seed", lambda own: seeded(seed or own)),
    ):
        runpy.run_path(str(script), run_name="__main__")
    metrics: dict[str, float] = json.loads(said.getvalue().splitlines()[-1])
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("scripts", nargs="+", type=Path)
    options = parser.parse_args()
    cluster: Any = contextlib.nullcontext()
    if options.cluster:
        cluster = pserver.Cluster(workers=2, run_dir=options.cluster)
    with cluster:
        for script in options.scripts:
            began = time.monotonic()
            metrics = run(script, options.seed)
            seconds = round(time.monotonic() - began, 1)
            found = {"script": script.stem, "metrics": metrics, "seconds": seconds}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
