"""Launchers for Python: ``from pserver import launch; launch.slurm("job.py", run_dir=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.launchers.plan import ClusterOptions, LaunchPlan
from psrpc.core.errors import InvalidArgument
from psrpc.options.declaration import NotThis, options_of
from psrpc.options.job_source import first_look

if TYPE_CHECKING:
    from coordinator.launchers.ray import RayResult


def slurm(
    job: str | Path,
    *,
    run_dir: str | Path,
    sbatch: Mapping[str, str] | None = None,
    **options: object,
) -> int:
    """Submits a cluster to Slurm, as ``coordinator launch slurm`` does.

    Args:
        job: the job file, which all nodes see.
        run_dir: a directory that all nodes see; the same call again goes on with its run.
        sbatch: options of ``sbatch`` by name without dashes, such as ``{"time": "1:00:00"}``.
        options: fields of `ClusterOptions`, such as ``shards=2, workers=4, certs="certs"``.

    Returns:
        The number of the batch job.

    Raises:
        PsError: an option is wrong, or Slurm refuses the job; quotes its message.
    """
    from coordinator.launchers import slurm

    plan = plan_from(job, run_dir, options)
    batch = slurm.BatchOptions(dict(sbatch or {}))
    slurm.check_slots(plan, batch)
    return slurm.submit(slurm.write_script(plan, batch, Path.cwd()))


def ray(
    job: str | Path,
    *,
    run_dir: str | Path,
    address: str | None = None,
    strategy: str = "PACK",
    resources: Mapping[str, Mapping[str, float]] | None = None,
    max_restarts: int = 10,
    place_s: float = 120.0,
    **options: object,
) -> RayResult:
    """Runs a cluster in Ray until the job is done, with an actor for each process. Ctrl-C and
    SIGTERM drain the cluster.

    Args:
        job: the job file, which all nodes see.
        run_dir: a directory that all nodes see; the same call again goes on with its run.
        address: HOST:PORT of a running Ray; None for the one that this process is connected to,
            else that of RAY_ADDRESS, else a new one on this machine, which ends with the call.
        strategy: how Ray places the processes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        resources: the resources of one process, by role, such as ``{"worker": {"CPU": 4, "GPU":
            1}}``; a process of a role that is left out has one CPU.
        max_restarts: limit on restarts of all processes together.
        place_s: seconds that Ray may take to place the processes.
        options: fields of `ClusterOptions`, such as ``shards=2, workers=4, certs="certs"``.

    Raises:
        PsError: an option is wrong, Ray is missing or has no room, a node does not see the run
            directory, or the job ends without being done; gives the reason.
    """
    from coordinator.launchers.ray import run
    from coordinator.launchers.ray_plan import RayOptions

    plan = plan_from(job, run_dir, options)
    return run(plan, RayOptions(address, strategy, resources or {}, max_restarts, place_s))


def kubernetes(job: str | Path, *, run_dir: str | Path, image: str, **options: object) -> str:
    """Submits a cluster to Kubernetes, as ``coordinator launch kubernetes`` does.

    Args:
        job: the job file, or with ``in_image=True`` its path in the image.
        run_dir: a directory within the claim; the same call again goes on with its run.
        image: the image of all processes.
        options: fields of `KubernetesOptions` and `ClusterOptions`, such as ``workers=4,
            memory="4Gi", certs="certs"``.

    Returns:
        The name of the JobSet.

    Raises:
        PsError: an option is wrong, or Kubernetes refuses the cluster; quotes its message.
    """
    return _submitted(job, run_dir, image, options, kubeflow=False)


def kubeflow(job: str | Path, *, run_dir: str | Path, image: str, **options: object) -> str:
    """Submits a cluster to Kubeflow Trainer; arguments and errors are those of `kubernetes`.

    Returns:
        The name of the TrainJob.
    """
    return _submitted(job, run_dir, image, options, kubeflow=True)


def _submitted(
    job: str | Path,
    run_dir: str | Path,
    image: str,
    options: Mapping[str, object],
    *,
    kubeflow: bool,
) -> str:
    from coordinator.launchers.early_checks import plan_to_launch
    from coordinator.launchers.kubernetes import kubectl
    from coordinator.launchers.kubernetes.cluster import KubernetesCluster, KubernetesOptions

    own = {each.name for each in options_of(KubernetesOptions)}
    given = {name: value for name, value in options.items() if name in own}
    said = KubernetesOptions(**checked(KubernetesOptions, {**given, "image": image}))
    shared = {name: value for name, value in options.items() if name not in own}
    values = {**checked(ClusterOptions, shared, *own), "run_dir": Path(run_dir)}
    plan = plan_to_launch(Path(job), ClusterOptions(**values), elsewhere=said.in_image)
    cluster = KubernetesCluster(plan, said, kubeflow)
    kubectl.submit_objects(cluster)
    kubectl.wait_for_pods(cluster)
    return cluster.name


def spark(
    spark: Any,
    job: str | Path,
    *,
    run_dir: str | Path,
    data: object = None,
    **options: object,
) -> dict[str, Any]:
    """Trains on the executors of Spark, and waits for the end.

    The coordinator is a child of this process. Each shard and each worker is the process of a Spark
    task, which Spark starts again as often as ``spark.task.maxFailures`` allows. Ctrl-C stops the
    job with a checkpoint, SIGTERM drains it; the same call goes on with the run.

    Args:
        spark: a ``SparkSession`` or ``SparkContext``, not of Spark Connect.
        job: the job file, which driver and executors see.
        run_dir: a directory that driver and executors see.
        data: a ``DataFrame``, which is written once to the run directory as Parquet, or the path
            or URL of existing data; the job reads the path from ``setting("data", "")``. A dict
            has several of these, by the names of the settings to read.
        options: fields of `ClusterOptions`, such as ``shards=2, workers=4, certs="certs"``.

    Returns:
        The run's ``summary.json``: its ``phase`` is ``done``, or ``stopped`` if a user has stopped
        the job.

    Raises:
        PsError: an option is wrong, there are too few slots, a process refuses its command, or the
            job fails; gives the reason.
        KeyboardInterrupt: the job was stopped by Ctrl-C.
    """
    from coordinator.launchers import spark as engine
    from coordinator.launchers import spark_data

    frames = spark_data.frames_of(data)
    plan = plan_from(job, run_dir, options)
    run = plan.options.run_dir
    places = {name: spark_data.place(run, name, each) for name, each in frames.items()}
    more = tuple(f"{name}={path}" for name, path in places.items())
    plan = replace(plan, options=replace(plan.options, overrides=(*plan.options.overrides, *more)))
    first_look(plan.job, plan.options.overrides)
    context = engine.context_of(spark)
    engine.await_slots(context, plan)
    for name, each in frames.items():
        if not isinstance(each, str | Path):
            spark_data.write_frame(each, Path(places[name]))
    return engine.run(context, plan)


def plan_from(job: str | Path, run_dir: str | Path, options: Mapping[str, object]) -> LaunchPlan:
    """Checks options given in Python, where paths may be text and several values a list; returns
    the plan.

    Raises:
        InvalidJob: there is no such job file.
        InvalidArgument: an option does not exist (the message suggests the nearest one) or has an
            unusable value, or there are neither certificates nor ``insecure=True``.
    """
    from coordinator.launchers.early_checks import plan_to_launch

    values = {**checked(ClusterOptions, options), "run_dir": Path(run_dir).absolute()}
    return plan_to_launch(Path(job), ClusterOptions(**values))


def checked(declaring: type, options: Mapping[str, object], *others: str) -> dict[str, Any]:
    """Converts options given in Python to fields of the class that declares them.

    Args:
        others: names of options that other classes declare, which the message may suggest.

    Raises:
        InvalidArgument: see `plan_from`.
    """
    declared = {each.name: each for each in options_of(declaring) if each.name != "run_dir"}
    said: dict[str, Any] = {}
    for name, value in options.items():
        if name not in declared:
            known = [*declared, *others]
            near = get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise InvalidArgument(f"a cluster has no option {name!r}; {advice}")
        if value is None:
            continue
        plain = list(value) if isinstance(value, tuple) else value
        try:
            said[name] = declared[name].from_toml(str(value) if isinstance(value, Path) else plain)
        except NotThis as expected:
            raise InvalidArgument(f"{name} is {value!r}; expected {expected}") from None
    return said
