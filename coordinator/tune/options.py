"""The options of ``coordinator tune``, declared once. Imports nothing slow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from coordinator.launch.options import LocalArguments, add_dashboard
from psrpc.options.config import add_options
from psrpc.options.declaration import Option, option, options_of, positive, run_path

Sampler = Literal["tpe", "grid", "random", "zip"]
Pruner = Literal["hyperband", "median", "none"]
PRUNERS: tuple[Pruner, ...] = get_args(Pruner)

TRIALS = 20
"""Default of ``--trials`` for samplers that have no last point."""

MAX_FAILURES = 10
"""Default of ``--max-failures``."""

CPU = "CPU:1"
"""Default of ``--resources``."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def time_limit_s(text: str) -> float:
    """Parses ``90``, ``90s``, ``30m``, ``2h`` or ``1d`` to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected 90s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, kw_only=True)
class TuneArguments(LocalArguments):
    """The options of ``coordinator tune``, without the job; options of a cluster hold for each
    trial.

    ``None`` leaves a choice to the job, or to the sampler.
    """

    run_dir: Path | None = option(
        "of the study; the same command goes on with it; default: runs/<job>-study-<time>",
        None,
        convert=run_path,
    )
    space: tuple[str, ...] = option(
        "the values of a setting: log(LOW,HIGH), uniform(LOW,HIGH), integers(LOW,HIGH), "
        "log_integers(LOW,HIGH) or choice(A,B,...); may be repeated; default: the `search` of the "
        "job file",
        (),
        metavar="KEY=RANGE",
    )
    metric: str = option(
        "what to improve, of the evaluations; default: the job's keep_best",
        "",
        metavar="max:NAME|min:NAME",
    )
    trials: int | None = option(
        f"in all; default: {TRIALS}, or with --sampler grid and zip every point",
        None,
        metavar="N",
        convert=positive,
    )
    parallel: int = option(
        "trials at the same time, which share the cores; default: %(default)s",
        1,
        metavar="P",
        convert=positive,
    )
    sampler: Sampler = option(
        "how to choose points; zip pairs the values of lists; default: %(default)s", "tpe"
    )
    pruner: str | None = option(
        "what ends trials that promise little; default: hyperband, and none with --sampler grid "
        "and zip",
        None,
        choices=PRUNERS,
    )
    seed: int = option("of the sampler; default: %(default)s", 0, metavar="N")
    timeout_s: float | None = option(
        "stop then, with checkpoints; default: no limit",
        None,
        flag="--timeout",
        metavar="30m",
        convert=time_limit_s,
    )
    max_failures: int = option(
        "end the study after more failed trials; default: %(default)s", MAX_FAILURES, metavar="N"
    )
    on: str | None = option(
        "where trials run: as batch jobs of slurm, tasks of ray, or JobSets of kubernetes; "
        "default: this machine",
        None,
        metavar="slurm|ray|kubernetes",
    )
    partition: str | None = option("slurm: the queue of the trials", None, metavar="NAME")
    time: str | None = option(
        "slurm: of one trial, as of sbatch; another batch job goes on with a longer one",
        None,
        metavar="LIMIT",
    )
    cpus_per_task: int | None = option(
        "slurm: cores of each trial; default: 1", None, metavar="N", convert=positive
    )
    sbatch: tuple[str, ...] = option(
        "slurm: another option of sbatch, such as account=vision; may be repeated",
        (),
        metavar="NAME=VALUE",
    )
    address: str | None = option(
        "ray: of a running Ray; default: that of RAY_ADDRESS, else one for this study",
        None,
        metavar="HOST:PORT",
    )
    resources: str = option(
        "ray: of one trial, such as CPU:4,GPU:1; default: %(default)s", CPU, metavar="NAME:N,…"
    )
    image: str | None = option("kubernetes: the image of all processes", None, metavar="REF")
    kubernetes: tuple[str, ...] = option(
        "kubernetes: another option of `coordinator launch kubernetes`, such as memory=4Gi; may be "
        "repeated",
        (),
        metavar="NAME=VALUE",
    )


def arguments_of(options: TuneArguments) -> list[str]:
    """Returns the command line of the options that hold for each trial."""
    said = []
    for each in options_of(LocalArguments):
        value = getattr(options, each.name)
        said += option_arguments(each, value.absolute() if isinstance(value, Path) else value)
    return said


def option_arguments(declared: Option, value: Any) -> list[str]:
    """Returns the command line of one option; nothing for its default."""
    if value is None or value == declared.default:
        return []
    if declared.kind == "flag":
        return [declared.flag]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"{declared.flag}={each}" for each in values]


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line of ``coordinator tune``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_options(parser, TuneArguments)
    lists: dict[str, Any] = {
        each.name: [] for each in options_of(TuneArguments) if each.kind == "list"
    }
    parser.set_defaults(**{**vars(TuneArguments()), **lists})
    add_dashboard(parser, "the study")


def tune_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, TuneArguments]:
    """Parses the arguments of ``coordinator tune``."""
    parser = argparse.ArgumentParser(prog="coordinator tune")
    add_tune_arguments(parser)
    args = parser.parse_args(arguments)
    return args, frozen_arguments(args)


def frozen_arguments(args: argparse.Namespace) -> TuneArguments:
    """Returns the options of parsed arguments."""
    said = (each.name for each in options_of(TuneArguments))
    return TuneArguments(**{name: _frozen(getattr(args, name)) for name in said})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
