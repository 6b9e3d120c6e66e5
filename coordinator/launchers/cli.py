"""The command line of ``coordinator launch``."""

from __future__ import annotations

import argparse
from pathlib import Path

from coordinator.launchers.plan import ClusterOptions
from psrpc.core.errors import InvalidArgument
from psrpc.options.config import add_options
from psrpc.options.declaration import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator launch``."""
    engines = parser.add_subparsers(dest="engine", required=True, metavar="ENGINE")
    slurm = engines.add_parser("slurm", help="submit the cluster as one batch job, also for mpirun")
    slurm.add_argument("job", type=Path, metavar="JOB", help="the job file")
    slurm.add_argument(
        "--dry-run", action="store_true", help="print the script, and submit and write nothing"
    )
    slurm.add_argument("--partition", metavar="NAME", help="the queue")
    slurm.add_argument("--time", metavar="LIMIT", help="as of sbatch: 2:00:00, 1-12:00:00")
    slurm.add_argument(
        "--nodes", type=positive, metavar="N", help="how many nodes the processes are spread over"
    )
    slurm.add_argument("--cpus-per-task", type=positive, metavar="N", help="cores of each process")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of sbatch, such as account=vision; may be repeated",
    )
    add_options(slurm, ClusterOptions)


def run(args: argparse.Namespace) -> int:
    """Submits the cluster, or prints what would be submitted; returns 0.

    Raises:
        PsError: it cannot be submitted.
    """
    from coordinator.launchers import slurm
    from coordinator.launchers.plan import plan_of
    from psrpc.options.declaration import options_of

    names = {each.name for each in options_of(ClusterOptions)}
    said = {name: value for name, value in vars(args).items() if name in names}
    if "run_dir" not in said:
        raise InvalidArgument("--run-dir is missing: name a directory that all nodes see")
    said["run_dir"] = said["run_dir"].absolute()
    said["overrides"] = tuple(said.get("overrides", ()))
    plan = plan_of(args.job, ClusterOptions(**said))
    given = {name: getattr(args, name.replace("-", "_")) for name in _SBATCH}
    batch = slurm.BatchOptions(
        {name: str(value) for name, value in given.items() if value} | _pairs(args.sbatch)
    )
    here = Path.cwd()
    if args.dry_run:
        print(slurm.batch_script(plan, batch, here), end="")  # noqa: T201
        return 0
    slurm.check_slots(plan, batch)
    path = slurm.write_script(plan, batch, here)
    number = slurm.submit(path)
    print(  # noqa: T201
        f"submitted batch job {number}; its processes write to {path.parent}/slurm-{number}.log"
    )
    return 0


_SBATCH = ("partition", "time", "nodes", "cpus-per-task")


def _pairs(said: list[str]) -> dict[str, str]:
    found = {}
    for each in said:
        name, separator, value = each.partition("=")
        if not (separator and name.strip("-") and value):
            raise InvalidArgument(f"--sbatch is {each!r}; expected NAME=VALUE, as account=vision")
        found[name.strip("-")] = value
    return found
