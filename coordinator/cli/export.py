"""The command line of ``coordinator export``."""

from __future__ import annotations

import argparse

from psrpc.files.urls import location
from psrpc.options.declaration import run_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator export``."""
    parser.add_argument(
        "source",
        type=run_path,
        metavar="RUN_DIR|CHECKPOINT_DIR",
        help="a run, or one of its checkpoints",
    )
    parser.add_argument(
        "--to",
        metavar="PATH",
        help="the model: MODEL.weights.h5, MODEL.keras, or DIRECTORY/ for a SavedModel; what is "
        "there already is not written over",
    )
    parser.add_argument(
        "--tables",
        type=location,
        metavar="DIRECTORY",
        help="its embedding tables: TABLE.safetensors each, with ids and rows; and all its other "
        "variables, in model.safetensors",
    )
    parser.add_argument(
        "--evicted",
        type=location,
        metavar="DIRECTORY",
        help="the same with the rows that tables have evicted, where they keep them",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of a run: this checkpoint; default: the newest good one, or that of "
        "the best epoch where stop_early has restore_best",
    )
    parser.add_argument(
        "--job", metavar="FILE", help="the job file, if it is not where it was when the run began"
    )


def run(args: argparse.Namespace) -> int:
    """Exports; returns 0, or 2 after one line on standard error."""
    from coordinator.export import export

    return export.run(args)
