"""The command line of ``coordinator up``."""

from __future__ import annotations

import argparse

from coordinator.launch.options import add_up_arguments as add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns 0 done, 1 failed, 2 bad input, 130 interrupted.

    Raises:
        InvalidJob: TensorFlow, which its workers need, is missing.
    """
    import os
    from contextlib import ExitStack

    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.warm_start import WarmStart
    from psrpc.ops.extras import check_tensorflow

    check_tensorflow("`coordinator up`")
    with ExitStack() as held:
        warm_start = None
        if args.warm_start:
            # Before the imports below, which take half a second.
            warm_start = held.enter_context(WarmStart(cluster_environment(os.environ)))
        from coordinator.launch import up
        from psrpc.ops.logs import make_printing_safe

        make_printing_safe()
        return up.run(args, warm_start)
