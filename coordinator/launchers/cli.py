"""The command line of ``coordinator launch``."""

from __future__ import annotations

import argparse
from pathlib import Path

from coordinator.launch.restarts import MAX_RESTARTS
from coordinator.launchers.plan import ClusterOptions, LaunchPlan
from psrpc.core.errors import InvalidArgument
from psrpc.ops.exit_status import DRAINED, INTERRUPTED
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
    _add_ray(engines)


def _add_ray(engines: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ray = engines.add_parser("ray", help="run the cluster in Ray, and stay until the job is done")
    ray.add_argument("job", type=Path, metavar="JOB", help="the job file")
    ray.add_argument(
        "--dry-run", action="store_true", help="print the processes, and start and write nothing"
    )
    ray.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of a running Ray; default: that of RAY_ADDRESS, else one for this job",
    )
    ray.add_argument(
        "--strategy",
        default="PACK",
        metavar="NAME",
        help="of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD; default: PACK",
    )
    ray.add_argument(
        "--resources",
        action="append",
        default=[],
        metavar="ROLE=NAME:N,…",
        help="of one process: worker=CPU:4,GPU:1; default: CPU:1; may be repeated",
    )
    ray.add_argument(
        "--max-restarts", type=int, default=MAX_RESTARTS, metavar="N", help="default: %(default)s"
    )
    ray.add_argument(
        "--place-timeout",
        dest="place_s",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long Ray may take to find places; default: %(default)g",
    )
    add_options(ray, ClusterOptions)


def run(args: argparse.Namespace) -> int:
    """Submits the cluster, or prints what would be submitted; returns 0.

    Raises:
        PsError: it cannot be submitted.
    """
    from coordinator.launchers.plan import plan_of
    from psrpc.options.declaration import options_of

    names = {each.name for each in options_of(ClusterOptions)}
    said = {name: value for name, value in vars(args).items() if name in names}
    if "run_dir" not in said:
        raise InvalidArgument("--run-dir is missing: name a directory that all nodes see")
    said["run_dir"] = said["run_dir"].absolute()
    said["overrides"] = tuple(said.get("overrides", ()))
    plan = plan_of(args.job, ClusterOptions(**said))
    return {"slurm": _run_slurm, "ray": _run_ray}[args.engine](plan, args)


def _run_slurm(plan: LaunchPlan, args: argparse.Namespace) -> int:
    from coordinator.launchers import slurm

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


def _run_ray(plan: LaunchPlan, args: argparse.Namespace) -> int:
    from coordinator.launchers import ray, ray_plan
    from psrpc.ops.logs import configure

    options = ray_plan.RayOptions(
        args.address,
        args.strategy,
        dict(map(ray_plan.role_resources, args.resources)),
        args.max_restarts,
        args.place_s,
    )
    if args.dry_run:
        print(ray_plan.described(plan, options), end="")  # noqa: T201
        return 0
    configure("console", "launch")
    try:
        done = ray.run(plan, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        return DRAINED
    print(f"{done.run_dir} is done, {done.steps} steps")  # noqa: T201
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
