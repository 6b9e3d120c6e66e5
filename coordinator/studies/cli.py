"""The command line of ``coordinator tune``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from coordinator.tune.options import TuneArguments, frozen_arguments
from coordinator.tune.options import add_tune_arguments as add_arguments
from psrpc.core.errors import InvalidArgument

if TYPE_CHECKING:
    from coordinator.tune.command import EngineOf

__all__ = ["add_arguments", "run"]


_OPTIONS = {
    "slurm": ("partition", "time", "cpus_per_task", "sbatch"),
    "ray": ("address", "resources"),
    "kubernetes": ("image", "kubernetes"),
}
"""The options of each engine."""


def engine_opener(args: argparse.Namespace) -> EngineOf | None:
    """Returns what opens the engine of ``--on``; None for trials on this machine.

    Raises:
        InvalidArgument: no such engine runs trials, or an option belongs to another one, or has a
            value that the engine does not take.
    """
    if args.on is not None and args.on not in _OPTIONS:
        instead = "expected slurm, ray or kubernetes"
        if args.on == "spark":
            instead = "a session of Spark is in Python; call pserver.tune(..., spark=session)"
        raise InvalidArgument(f"--on is {args.on}: {instead}")
    for engine, names in _OPTIONS.items():
        for name in names:
            if engine != args.on and getattr(args, name) not in ([], getattr(TuneArguments, name)):
                flag = f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"{flag} is an option of --on {engine}; leave it out")
    if args.on == "ray":
        from coordinator.studies.engine_trials import task_trials
        from coordinator.studies.ray_trials import ray_engine

        return partial(task_trials, ray_engine)
    if args.on == "slurm":
        from coordinator.studies.engine_trials import task_trials
        from coordinator.studies.slurm_trials import slurm_engine

        return partial(task_trials, slurm_engine)
    if args.on == "kubernetes":
        from coordinator.studies.kubernetes_trials import kubernetes_trials
        from coordinator.studies.trial_clusters import pod_options

        # At once, before the job is read.
        pod_options(frozen_arguments(args))
        return kubernetes_trials
    return None


def run(args: argparse.Namespace) -> int:
    """Runs the study; returns 0 done or out of time, 1 failed, 2 bad input, 130 interrupted.

    Raises:
        InvalidJob: TensorFlow, which the trials need, or Optuna is missing.
        InvalidArgument: ``--on`` names no engine that runs trials, an option is another one's, or
            the directory of the study cannot be used.
        AlreadyExists: another command runs the study.
    """
    import os
    from contextlib import ExitStack
    from importlib.util import find_spec

    from coordinator.launch.commands import cluster_environment
    from coordinator.launch.warm_start import WarmStart
    from coordinator.tune.directory import StudyDirectory
    from psrpc.ops.extras import check_tensorflow, missing
    from psrpc.ops.process import PARENT_PID, die_with_parent

    engine_of = engine_opener(args)
    check_tensorflow("`coordinator tune`")
    if find_spec("optuna") is None:
        raise missing("`coordinator tune`", "Optuna", "tune")
    if PARENT_PID in os.environ:
        die_with_parent()
    if args.run_dir is not None:
        # At once: what follows reads the job, which takes long on a machine with much to do.
        StudyDirectory(args.run_dir).check()
    with ExitStack() as held:
        warm_start = None
        if args.warm_start:
            # Started before the imports below, which take half a second.
            warm_start = held.enter_context(WarmStart(cluster_environment(os.environ)))
        from coordinator.tune import command
        from psrpc.ops.logs import make_printing_safe

        make_printing_safe()
        return command.run_study(args, warm_start, engine_of)
