"""A cluster in Ray: a placement group, and an actor around each process."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.launchers.plan import LaunchPlan
from coordinator.launchers.ray_actor import ProcessKeeper
from coordinator.launchers.ray_driver import RayDriver
from coordinator.launchers.ray_plan import (
    Bundle,
    RayOptions,
    amounts_of,
    check_places,
    tasks_of,
    total,
)
from psrpc.core.errors import InvalidArgument, LaunchFailed, disk_code, disk_reason
from psrpc.files.run_paths import read_summary
from psrpc.ops.extras import check_ray

TOKEN = "launch.token"
"""Beginning of the name of a file in the run directory. A node that sees the file sees the
directory."""

ANSWER_S = 10.0
"""How long Ray may take to accept a connection."""


@dataclass(frozen=True)
class RayResult:
    """A job that is done.

    Attributes:
        exit_status: the coordinator's exit status, 0.
        steps: global steps of the run.
        restarts: number of restarts by process, for those that had any.
    """

    run_dir: Path
    exit_status: int
    steps: int
    restarts: Mapping[str, int]


def run(plan: LaunchPlan, options: RayOptions) -> RayResult:
    """Runs the cluster until the job is done; Ctrl-C and SIGTERM drain it.

    Raises:
        InvalidJob: Ray is not installed, or too old.
        LaunchFailed: Ray cannot be reached or has no room, or a node does not see the run
            directory. Nothing was trained.
        JobFailed: the job ended without being done; gives the reason.
    """
    check_ray("a launch on Ray")
    with connected(options.address):
        import ray

        tasks = tasks_of(plan, options)
        bundles = {name: options.bundle(name) for name in tasks}
        check_places(bundles, options.strategy, alive_nodes())
        with _token(plan.options.run_dir) as token, placed(bundles, options) as actors:
            driver = RayDriver(
                tasks,
                actors,
                plan.options.run_dir,
                plan.port,
                _paths(plan, token),
                max_restarts=options.max_restarts,
                place_s=options.place_s,
            )
            try:
                driver.run()
            except ray.exceptions.RayError as error:
                why = str(error).strip().partition("\n")[0]
                raise LaunchFailed(f"Ray has failed: {type(error).__name__}: {why}") from error
            steps = int(read_summary(plan.options.run_dir).get("global_step") or 0)
            return RayResult(plan.options.run_dir, 0, steps, driver.restarts)


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connects to Ray, unless this process is connected already. Checks a given address first,
    because `ray.init` waits for minutes if nothing answers there."""
    import ray

    if ray.is_initialized():
        if address is not None:
            raise InvalidArgument("this process is connected to Ray already; leave out address")
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        check_answers(address)
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise LaunchFailed(f"Ray at {address!r} refuses: {why}") from None
    try:
        yield
    finally:
        ray.shutdown()


def alive_nodes() -> list[Bundle]:
    """Returns the resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_answers(address: str) -> None:
    """Checks that a Ray takes connections at ``address``.

    Raises:
        InvalidArgument: ``address`` is no HOST:PORT.
        LaunchFailed: nothing answers there within `ANSWER_S`.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not (separator and port.isdecimal()):
        raise InvalidArgument(
            f"the address of Ray is {address!r}; expected HOST:PORT, as `ray start` prints it, or "
            "local"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise LaunchFailed(
            f"Ray at {address} does not answer: {error.strerror or error}; see whether it is up: "
            f"ray status --address {address}"
        ) from None


@contextmanager
def _token(run_dir: Path) -> Iterator[Path]:
    """Writes the file that each node looks for; yields its path, and removes it after the block."""
    path = run_dir / f"{TOKEN}.{secrets.token_hex(8)}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise LaunchFailed(
            f"{str(path)!r} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from None
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def _paths(plan: LaunchPlan, token: Path) -> dict[str, str]:
    options = plan.options
    found = {str(token): f"run directory {str(options.run_dir)!r}"}
    for path, name in (
        (plan.job, "job file"),
        (options.certs, "certificates"),
        (options.token_file, "token file"),
    ):
        if path:
            found[str(path.absolute())] = f"{name} {str(path)!r}"
    return found


@contextmanager
def placed(bundles: Mapping[str, Bundle], options: RayOptions) -> Iterator[dict[str, Any]]:
    """Reserves the resources of all processes at once; yields an actor for each process, by its
    name."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(each) for each in bundles.values()], strategy=options.strategy)
    actors: dict[str, Any] = {}
    try:
        if not group.wait(options.place_s):
            free = {k: v for k, v in ray.available_resources().items() if ":" not in k}
            asked, left = amounts_of(total(bundles.values())), amounts_of(free)
            raise LaunchFailed(
                f"Ray has not reserved {asked} in {options.place_s:g} s; others hold what it has, "
                f"and {left or 'nothing'} is left: ray status"
            )
        for index, (name, bundle) in enumerate(bundles.items()):
            actors[name] = (
                ray.remote(ProcessKeeper)
                .options(
                    **resource_options(bundle),
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                )
                .remote(name)
            )
        yield actors
    finally:
        for actor in actors.values():
            ray.kill(actor)
        remove_placement_group(group)


def resource_options(bundle: Bundle) -> dict[str, Any]:
    """Returns the options of an actor or a task that has the resources of ``bundle``."""
    others = {kind: n for kind, n in bundle.items() if kind not in _OWN_OPTIONS}
    own = {_OWN_OPTIONS[kind]: n for kind, n in bundle.items() if kind in _OWN_OPTIONS}
    return {"num_cpus": 0, **own, "resources": others}


_OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
