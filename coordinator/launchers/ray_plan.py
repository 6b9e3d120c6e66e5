"""A cluster in Ray: its processes with their resources, and whether there is room for them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.launch.commands import letters
from coordinator.launch.process_health import COORDINATOR
from coordinator.launch.restarts import MAX_RESTARTS
from coordinator.launchers.plan import LaunchPlan
from coordinator.launchers.ray_driver import RayTask
from psrpc.core.errors import InvalidArgument, LaunchFailed
from psrpc.core.text import counted

PLACE_S = 120.0
"""Default of the time that Ray may take to place a process."""

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ROLES = ("coordinator", "shard", "worker")

Bundle = Mapping[str, float]
"""Resources by Ray's names: ``{"CPU": 2, "GPU": 1}``."""


@dataclass(frozen=True)
class RayOptions:
    """Options of Ray.

    Attributes:
        address: HOST:PORT of a running Ray; None for the one that this process is connected to,
            else that of RAY_ADDRESS, else a new one on this machine, which ends with the call.
        strategy: how Ray places the processes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        resources: the resources of one process, by role: ``{"worker": {"CPU": 4, "GPU": 1}}``; a
            process of a role that is left out has one CPU.
        max_restarts: limit on restarts of all processes together.
        place_s: how long Ray may take to place the processes.
    """

    address: str | None = None
    strategy: str = "PACK"
    resources: Mapping[str, Bundle] = field(default_factory=dict)
    max_restarts: int = MAX_RESTARTS
    place_s: float = PLACE_S

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a value that Ray would refuse later."""
        if self.strategy not in STRATEGIES:
            raise InvalidArgument(
                f"strategy is {self.strategy!r}; expected {', '.join(STRATEGIES)}"
            )
        for role, bundle in self.resources.items():
            if role not in ROLES:
                raise InvalidArgument(f"resources has {role!r}; expected {', '.join(ROLES)}")
            if not (bundle and all(amount > 0 for amount in bundle.values())):
                raise InvalidArgument(
                    f"resources of {role} is {dict(bundle)!r}; expected positive amounts, as CPU: 1"
                )
        if self.max_restarts < 0:
            raise InvalidArgument(f"max_restarts is {self.max_restarts}; expected 0 or more")
        if self.place_s <= 0:
            raise InvalidArgument(f"place_s is {self.place_s}; expected seconds above 0")

    def bundle(self, process: str) -> Bundle:
        """Returns the resources of a process."""
        return self.resources.get(process.partition("-")[0], {"CPU": 1})


def resources_by_role(said: Iterable[str]) -> dict[str, Bundle]:
    """Reads resources of roles, such as ``worker=CPU:4,GPU:1``.

    Raises:
        InvalidArgument: a text has another form, or a role comes twice.
    """
    found: dict[str, Bundle] = {}
    for text in said:
        role, bundle = _role_resources(text)
        if role in found:
            raise InvalidArgument(f"--resources has {role} twice; say all of them in one")
        found[role] = bundle
    return found


def read_bundle(text: str) -> Bundle:
    """Parses ``CPU:4,GPU:1``; returns nothing for text of another form."""
    pairs = [each.rpartition(":") for each in text.split(",")]
    try:
        found = {kind: float(amount) for kind, _, amount in pairs}
    except ValueError:
        return {}
    return found if all(found) else {}


def _role_resources(text: str) -> tuple[str, Bundle]:
    role, _, amounts = text.partition("=")
    found = read_bundle(amounts)
    if not (role and found):
        raise InvalidArgument(
            f"--resources is {text!r}; expected ROLE=NAME:N, as worker=CPU:4,GPU:1"
        )
    return role, found


def tasks_of(plan: LaunchPlan, options: RayOptions) -> dict[str, RayTask]:
    """Returns the processes by name; the names are those of ``coordinator up``."""
    found = {COORDINATOR: RayTask("coordinator.cli", tuple(plan.coordinator))}
    for index in range(plan.options.shards):
        arguments = (*plan.shard, "--shard", str(index))
        found[f"shard-{index}"] = RayTask("pserver.cli", arguments)
    for index in range(plan.options.workers):
        name = f"worker-{letters(index)}"
        # By default, TensorFlow takes as many threads as the node has cores.
        threads = str(max(1, int(options.bundle(name).get("CPU", 1))))
        environment = {"TF_NUM_INTRAOP_THREADS": threads}
        found[name] = RayTask("worker.cli", tuple(plan.worker), environment)
    return found


def described(plan: LaunchPlan, options: RayOptions) -> str:
    """Returns what would be started, a line for each process."""
    lines = [f"placement group: {options.strategy}"]
    for name, task in tasks_of(plan, options).items():
        where = "--bind" if name == COORDINATOR else "--coordinator"
        command = shlex.join(["python", "-P", "-m", task.module, *task.arguments])
        lines.append(
            f"{name} ({amounts_of(options.bundle(name))}): {command} {where} HOST:{plan.port}"
        )
    return "\n".join(lines) + "\n"


def check_places(
    bundles: Mapping[str, Bundle],
    strategy: str,
    nodes: Sequence[Bundle],
    what: str = "the cluster's {} processes need",
    fix: str = "ask for fewer shards or workers, or for less with resources, or add nodes",
) -> None:
    """Checks that all processes fit at the same time if Ray has nothing else to run. Ray itself
    would let a cluster that does not fit wait forever.

    Args:
        bundles: resources by process.
        nodes: resources of each node that is alive.
        what: what needs them, with a place for their number.
        fix: what to do about it.

    Raises:
        LaunchFailed: they do not fit; says which resources they need, and what Ray has.
    """
    asked = total(bundles.values())
    there = total(nodes)
    on = counted(len(nodes), "node")
    if short := {kind: there.get(kind, 0) for kind in asked if there.get(kind, 0) < asked[kind]}:
        raise LaunchFailed(
            f"{what.format(len(bundles))} {amounts_of(asked)}, and Ray has "
            f"{amounts_of(short)} on {on}; {fix}"
        )
    for name, bundle in bundles.items():
        if not any(_fits(bundle, node) for node in nodes):
            raise LaunchFailed(
                f"{name} needs {amounts_of(bundle)}, and no node of Ray has that ({on}); {fix}"
            )
    if strategy == "STRICT_PACK" and not any(_fits(asked, node) for node in nodes):
        raise LaunchFailed(
            f"STRICT_PACK needs {amounts_of(asked)} on one node, and none of {on} has that; {fix}"
        )
    if strategy == "STRICT_SPREAD" and len(nodes) < len(bundles):
        raise LaunchFailed(
            f"STRICT_SPREAD needs a node for each of {len(bundles)} processes, and Ray has {on}; "
            "say SPREAD"
        )


def total(bundles: Iterable[Bundle]) -> dict[str, float]:
    """Adds up resources by kind."""
    found: dict[str, float] = {}
    for bundle in bundles:
        for kind, amount in bundle.items():
            found[kind] = found.get(kind, 0) + amount
    return found


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(node.get(kind, 0) >= amount for kind, amount in bundle.items())


def amounts_of(bundle: Bundle) -> str:
    """Returns resources in words, such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
