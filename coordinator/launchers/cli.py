"""The command line of ``coordinator launch``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from coordinator.launch.restarts import MAX_RESTARTS
from coordinator.launchers.kubernetes.cluster import KubernetesOptions
from coordinator.launchers.plan import ClusterOptions, LaunchPlan
from psrpc.core.errors import InvalidArgument
from psrpc.ops.exit_status import DRAINED, INTERRUPTED
from psrpc.options.config import add_options
from psrpc.options.declaration import options_of, positive


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
    _add_kubernetes(engines)
    _add_ray(engines)


def _add_kubernetes(engines: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for engine, what in _ON_KUBERNETES.items():
        parser = engines.add_parser(engine, help=f"submit the cluster as a {what}")
        parser.add_argument("job", type=Path, metavar="JOB", help="the job file, of 1 MB at most")
        parser.add_argument(
            "--dry-run", action="store_true", help="print the manifest without keys; submit nothing"
        )
        add_options(parser, KubernetesOptions)
        add_options(parser, ClusterOptions, _NOTES)


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
    """Submits the cluster, or prints what would be submitted; returns the exit status.

    Raises:
        PsError: it cannot be submitted.
    """
    if args.engine in _ON_KUBERNETES:
        return _run_kubernetes(args)
    return {"slurm": _run_slurm, "ray": _run_ray}[args.engine](_plan(args), args)


def _run_slurm(plan: LaunchPlan, args: argparse.Namespace) -> int:
    from coordinator.launchers import slurm

    given = {name: getattr(args, name.replace("-", "_")) for name in _SBATCH}
    batch = slurm.batch_options(given, args.sbatch)
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
        ray_plan.resources_by_role(args.resources),
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


def _run_kubernetes(args: argparse.Namespace) -> int:
    from coordinator.launchers.early_checks import plan_to_launch
    from coordinator.launchers.kubernetes import job_set, kubectl
    from coordinator.launchers.kubernetes.cluster import KubernetesCluster

    said = _said(args, KubernetesOptions)
    if "image" not in said:
        raise InvalidArgument("--image is missing: name an image that docker/Dockerfile makes")
    options = KubernetesOptions(**said)
    shared = ClusterOptions(**_said_of_cluster(args))
    plan = plan_to_launch(args.job, shared, elsewhere=options.in_image)
    cluster = KubernetesCluster(plan, options, kubeflow=args.engine == "kubeflow")
    if args.dry_run:
        print(job_set.printed(cluster), end="")  # noqa: T201
        return 0
    kubectl.submit_objects(cluster)
    print(  # noqa: T201
        f"submitted {cluster.kind} {cluster.name}; its coordinator writes to: "
        f"kubectl logs --follow job/{cluster.name}-coordinator-0",
        flush=True,
    )
    try:
        missing = kubectl.wait_for_pods(cluster)
    except KeyboardInterrupt:
        return INTERRUPTED
    if missing:
        print(f"after {options.wait:g} s: {missing}")  # noqa: T201
    return 0


def _plan(args: argparse.Namespace) -> LaunchPlan:
    from coordinator.launchers.early_checks import plan_to_launch

    said = _said_of_cluster(args)
    return plan_to_launch(
        args.job, ClusterOptions(**{**said, "run_dir": said["run_dir"].absolute()})
    )


def _said_of_cluster(args: argparse.Namespace) -> dict[str, Any]:
    said = _said(args, ClusterOptions)
    if "run_dir" not in said:
        raise InvalidArgument("--run-dir is missing: name a directory that all nodes see")
    return said


def _said(args: argparse.Namespace, declaring: type) -> dict[str, Any]:
    """Returns the options of the class ``declaring`` that the command line sets, by name."""
    given = {each.name: getattr(args, each.name, None) for each in options_of(declaring)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


_NOTES = {"run_dir": "; here: a directory of the claim, as first", "port": "; here: 5000"}

_ON_KUBERNETES = {"kubernetes": "JobSet", "kubeflow": "TrainJob of Kubeflow"}

_SBATCH = ("partition", "time", "nodes", "cpus-per-task")
