"""The command line of ``coordinator checkpoint``."""

from __future__ import annotations

import argparse

from psrpc.core.names import RUNS
from psrpc.options.declaration import run_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the commands of ``coordinator checkpoint`` and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list a run's checkpoints, newest first")
    _add_run_dir(ls)
    ls.add_argument("--json", action="store_true", help="print a JSON list, sizes in bytes")
    verify = actions.add_parser(
        "verify",
        help="read checkpoints through and say which file is good",
        description="Reads every file and compares it with its manifest. Ends with status 1 if "
        "any is bad.",
    )
    verify.add_argument(
        "source", type=run_path, metavar="RUN_DIR|CHECKPOINT_DIR", help="all of a run, or one"
    )
    diff = actions.add_parser(
        "diff",
        help="compare what two checkpoints hold",
        description="Compares variables, optimizer slots, steps and applied batches, whatever the "
        "number of shards. Ends with status 1 if they differ.",
    )
    diff.add_argument(
        "one",
        type=run_path,
        metavar="A",
        help="the directory of a checkpoint, or its name in a run",
    )
    diff.add_argument("other", type=run_path, metavar="B", help="the same of another")
    diff.add_argument(
        "--run-dir",
        type=run_path,
        metavar="RUN_DIR",
        help=f"the run of which A and B are names (default: the newest under {RUNS}/)",
    )
    prune = actions.add_parser(
        "prune",
        help="remove the checkpoints that the job does not want kept",
        description="Keeps the newest of keep_checkpoints and the best one, as the job says; a "
        "coordinator does the same after each checkpoint. None is removed before the newest has "
        "been read back. Refuses while a coordinator runs.",
    )
    _add_run_dir(prune)
    prune.add_argument("--keep", type=int, metavar="N", help="keep so many, not what the job says")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=run_path, metavar="RUN_DIR", help="the directory of a run")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status: 0, 1 when something is bad or differs, 2 after
    one line on standard error."""
    from coordinator.cli import checkpoint as checkpoint_cli

    return checkpoint_cli.run(args)
