"""Who may import whom, read from the source. DESIGN: packages point one way only."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("psrpc", "coordinator", "pserver", "worker")

ALLOWED = {
    "psrpc": {"psrpc"},
    "coordinator": {"coordinator", "psrpc"},
    "pserver": {"pserver", "psrpc", "coordinator.client"},
    "worker": {
        "worker",
        "psrpc",
        "coordinator.client",
        "pserver.client",
        "pserver.rows_wanted",
        "pserver.tables.initial",
        "pserver.tables.rules",
        "pserver.workspace",
        "pserver.updates.allowlist",
        "pserver.updates.keras_objects",
        "pserver.updates.keras_slots",
        "pserver.updates.numpy_engine",
    },
}

TENSORFLOW = {"tensorflow", "keras"}
MAY_USE_TENSORFLOW = {
    "pserver.updates.keras_engine",
    "pserver.updates.keras_function",
    "pserver.updates.keras_objects",
    "pserver.updates.keras_pieces",
    "pserver.updates.keras_slots",
}

PURE = {
    "psrpc.batch",
    "psrpc.document",
    "psrpc.exit_status",
    "psrpc.identity",
    "psrpc.intervals",
    "psrpc.permissions",
    "psrpc.plan",
    "psrpc.plan_form",
    "psrpc.safetensors_form",
    "psrpc.string_ids",
    "psrpc.urls",
    "psrpc.waiting",
    "pserver.applied",
    "pserver.assembly",
    "pserver.compensation",
    "pserver.counters",
    "pserver.pulled",
    "pserver.pushes",
    "pserver.rates",
    "pserver.staging",
    "pserver.tables.candidates",
    "pserver.tables.direct_index",
    "pserver.tables.evicted",
    "pserver.tables.eviction",
    "pserver.tables.frozen",
    "pserver.tables.hash_index",
    "pserver.tables.id_store",
    "pserver.tables.initial",
    "pserver.tables.mean",
    "pserver.tables.memory",
    "pserver.tables.part",
    "pserver.tables.removals",
    "pserver.tables.request_check",
    "pserver.tables.row_store",
    "pserver.tables.row_update",
    "pserver.tables.rules",
    "pserver.tables.table",
    "pserver.tables.tables",
    "pserver.updates.allowlist",
    "pserver.updates.numpy_engine",
    "coordinator.assignments",
    "coordinator.departures",
    "coordinator.job_warnings",
    "coordinator.membership",
    "coordinator.ledger",
    "coordinator.open_round",
    "coordinator.outset",
    "coordinator.points",
    "coordinator.recorder",
    "coordinator.restarts",
    "coordinator.rounds",
    "coordinator.evaluation",
    "coordinator.guard",
    "coordinator.lifecycle",
    "coordinator.progress",
    "coordinator.retention",
    "coordinator.saving",
    "coordinator.snapshots",
    "coordinator.timeline",
    "coordinator.vitals",
    "coordinator.wording",
    "coordinator.work",
    "pserver.fence",
    "pserver.freeze",
    "pserver.gate",
    "pserver.pulls",
    "pserver.row_reads",
    "pserver.row_wire",
    "pserver.rows_wanted",
    "pserver.shelf",
    "pserver.table_ids",
    "worker.actions",
    "worker.conduct",
    "worker.done",
    "worker.ending",
    "worker.membership",
    "worker.next_batch",
    "worker.row_sets",
    "worker.rows",
}
IMPURE = {"grpc", "threading", "time", "socket", "asyncio", "tensorflow", "keras", "sqlite3", "os"}

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
MAY_READ_THE_WALL_CLOCK = {
    "coordinator.certs_cli",
    "coordinator.checkpoint_cli",
    "coordinator.checkpoints",
    "coordinator.checkup",
    "coordinator.serve",
    "coordinator.store",
    "coordinator.surroundings",
    "coordinator.tensorboard",
    "coordinator.up",
    "psrpc.security",
}
"""For names and stamps that people read."""


def modules() -> dict[str, Path]:
    found = {}
    for role in ROLES:
        for path in sorted((ROOT / role).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Every module that the file names in an import, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in MODULES
            )
    return names


@pytest.mark.parametrize("module", MODULES)
def test_packages_point_one_way(module: str) -> None:
    allowed = ALLOWED[module.split(".")[0]]
    for name in imports(MODULES[module]):
        if name.split(".")[0] in ROLES and not any(
            name == ok or name.startswith(ok + ".") or ok.startswith(name + ".") for ok in allowed
        ):
            pytest.fail(f"{module} imports {name}; it may import {sorted(allowed)}")


def test_modules_form_no_circle() -> None:
    """Imports within functions and for type checkers count."""
    known = MODULES.keys()
    graph = {name: (imports(path) & known) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_tensorflow_stays_where_it_belongs(module: str) -> None:
    if module.startswith("worker") or module in MAY_USE_TENSORFLOW:
        return
    used = {name.split(".")[0] for name in imports(MODULES[module])} & TENSORFLOW
    assert not used, f"{module} imports {used}"


def test_the_extra_for_urls_is_imported_when_a_url_is_used() -> None:
    assert [name for name, path in MODULES.items() if "fsspec" in imports(path)] == ["psrpc.remote"]
    tree = ast.parse(MODULES["psrpc.remote"].read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("fsspec" in ast.unparse(node) for node in at_import)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_decided_by_a_clock_that_may_be_set(module: str) -> None:
    if module in MAY_READ_THE_WALL_CLOCK:
        return
    tree = ast.parse(MODULES[module].read_text())
    read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not read & WALL_CLOCK


@pytest.mark.parametrize("module", sorted(PURE))
def test_cores_are_pure(module: str) -> None:
    used = {name.split(".")[0] for name in imports(MODULES[module])} & IMPURE
    assert not used, f"{module} imports {used}; time and effects come from its engine"


@pytest.mark.slow
def test_a_worker_with_other_gradients_needs_no_tensorflow() -> None:
    code = (
        "import sys; import worker.performer, worker.gradient_source;"
        f"print(*sorted({TENSORFLOW!r} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not ran.stdout.strip()
