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
    "pserver": {"pserver", "psrpc", "coordinator.client.client"},
    "worker": {
        "worker",
        "psrpc",
        "coordinator.client.client",
        "pserver.client.client",
        "pserver.core.rows_wanted",
        "pserver.tables.initial",
        "pserver.tables.rules",
        "pserver.transport.workspace",
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
    "psrpc.core.batch",
    "psrpc.core.document",
    "psrpc.core.exit_status",
    "psrpc.security.identity",
    "psrpc.core.intervals",
    "psrpc.security.permissions",
    "psrpc.core.plan",
    "psrpc.core.tensor_form",
    "psrpc.checkpoint.safetensors_form",
    "psrpc.core.string_ids",
    "psrpc.files.urls",
    "psrpc.ops.waiting",
    "pserver.core.applied",
    "pserver.core.assembly",
    "pserver.engine.compensation",
    "pserver.core.counters",
    "pserver.engine.pulled",
    "pserver.engine.pushes",
    "pserver.core.rates",
    "pserver.core.staging",
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
    "coordinator.transitions.assignments",
    "coordinator.transitions.departures",
    "coordinator.records.job_warnings",
    "coordinator.membership.membership",
    "coordinator.schedule.ledger",
    "coordinator.schedule.open_round",
    "coordinator.schedule.initial_work",
    "coordinator.dashboard.series",
    "coordinator.dashboard.recorder",
    "coordinator.launch.restarts",
    "coordinator.schedule.rounds",
    "coordinator.schedule.evaluation",
    "coordinator.schedule.guard",
    "coordinator.core.lifecycle",
    "coordinator.membership.progress",
    "coordinator.core.retention",
    "coordinator.checkpoints.saving",
    "coordinator.checkpoints.snapshots",
    "coordinator.display.timeline",
    "coordinator.launch.process_health",
    "coordinator.core.wording",
    "coordinator.core.work",
    "pserver.core.fence",
    "pserver.engine.freeze",
    "pserver.engine.gate",
    "pserver.engine.pulls",
    "pserver.engine.row_reads",
    "pserver.wire.row_messages",
    "pserver.core.rows_wanted",
    "pserver.engine.held_snapshots",
    "pserver.core.table_ids",
    "worker.protocol.actions",
    "worker.protocol.conduct",
    "worker.protocol.done",
    "worker.protocol.ending",
    "worker.protocol.membership",
    "worker.protocol.next_batch",
    "worker.embedding.row_sets",
    "worker.embedding.rows",
}
IMPURE = {"grpc", "threading", "time", "socket", "asyncio", "tensorflow", "keras", "sqlite3", "os"}

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
MAY_READ_THE_WALL_CLOCK = {
    "coordinator.cli.certs",
    "coordinator.cli.checkpoint",
    "coordinator.checkpoints.checkpoints",
    "coordinator.doctor.checks",
    "coordinator.process.serve",
    "coordinator.records.store",
    "coordinator.rpc.environment",
    "coordinator.records.tensorboard",
    "coordinator.launch.up",
    "psrpc.security.credentials",
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
    assert [name for name, path in MODULES.items() if "fsspec" in imports(path)] == [
        "psrpc.files.remote"
    ]
    tree = ast.parse(MODULES["psrpc.files.remote"].read_text())
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
        "import sys; import worker.loop.performer, worker.step.gradient_source;"
        f"print(*sorted({TENSORFLOW!r} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not ran.stdout.strip()
