"""The command line of ``coordinator tune``."""

from __future__ import annotations

import argparse

from coordinator.tune.options import add_tune_arguments as add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Runs the study; returns 0 done or out of time, 1 failed, 2 bad input, 130 interrupted.

    Raises:
        InvalidJob: TensorFlow, which the trials need, or Optuna is missing.
    """
    import os
    from contextlib import ExitStack
    from importlib.util import find_spec

    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.warm_start import WarmStart
    from psrpc.ops.extras import check_tensorflow, missing
    from psrpc.ops.process import PARENT_PID, die_with_parent

    check_tensorflow("`coordinator tune`")
    if find_spec("optuna") is None:
        raise missing("`coordinator tune`", "Optuna", "tune")
    if PARENT_PID in os.environ:
        die_with_parent()
    with ExitStack() as held:
        warm_start = None
        if args.warm_start:
            # Started before the imports below, which take half a second.
            warm_start = held.enter_context(WarmStart(cluster_environment(os.environ)))
        from coordinator.tune import command
        from psrpc.ops.logs import make_printing_safe

        make_printing_safe()
        return command.run_study(args, warm_start)
