"""Allowed imports, read from the source. DESIGN: packages point one way only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
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
        "pserver.core.table_ids",
        "pserver.process.config",
        "pserver.process.hosted",
        "pserver.tables.initial",
        "pserver.tables.rules",
        "pserver.transport.workspace",
        "pserver.updates.allowlist",
        "pserver.updates.keras_objects",
        "pserver.updates.numpy_engine",
    },
}

TENSORFLOW = {"tensorflow", "keras"}
MAY_USE_TENSORFLOW = {
    "pserver.updates.keras_engine",
    "pserver.updates.keras_objects",
}

PURE = {
    "coordinator.core",
    "coordinator.membership",
    "coordinator.schedule",
    "coordinator.search",
    "psrpc.core",
    "worker.protocol",
}
"""Rooms whose modules import nothing of :data:`IMPURE`, neither themselves nor through others of
ours: time and effects come in as arguments, reasons go out."""

IMPURE = {"grpc", "threading", "time", "socket", "asyncio", "tensorflow", "keras", "sqlite3", "os"}

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
MAY_READ_THE_WALL_CLOCK = {
    "coordinator.cli.certs",
    "coordinator.cli.checkpoint",
    "coordinator.checkpoints.checkpoints",
    "coordinator.doctor.checks",
    "coordinator.process.serve",
    "coordinator.records.store",
    "coordinator.rpc.status",
    "coordinator.records.tensorboard",
    "coordinator.launch.hosts",
    "coordinator.launch.up",
    "coordinator.tune.directory",
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


@cache
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
    if module == "pserver":  # the façade, see FACADE
        return
    allowed = ALLOWED[module.split(".")[0]]
    for name in imports(MODULES[module]):
        if name.split(".")[0] in ROLES and not any(
            name == ok or name.startswith(ok + ".") or ok.startswith(name + ".") for ok in allowed
        ):
            pytest.fail(f"{module} imports {name}; it may import {sorted(allowed)}")


def test_modules_form_no_circle() -> None:
    """Imports within functions and for type checkers count."""
    TopologicalSorter(GRAPH).prepare()


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


FACADE = "pserver"
"""Resolves the names of job files on first use, from the worker; contains nothing else."""

GRAPH = {
    name: (imports(path) & MODULES.keys()) - {name, FACADE}
    for name, path in MODULES.items()
    if name != FACADE
}


def room(module: str) -> str:
    """``package.room`` of a module; a package for what stands directly in it."""
    return ".".join(module.split(".")[:2])


def way_to(module: str, wanted: set[str]) -> list[str]:
    """The shortest chain of imports from ``module`` to a module that imports one of ``wanted``."""
    ways = {module: [module]}
    queue = [module]
    for name in queue:
        used = {found.split(".")[0] for found in imports(MODULES[name])} & wanted
        if used:
            return [*ways[name], *sorted(used)]
        for found in sorted(GRAPH[name] - ways.keys()):
            ways[found] = [*ways[name], found]
            queue.append(found)
    return []


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) in PURE])
def test_pure_rooms_reach_no_clock_thread_or_disk(module: str) -> None:
    assert not way_to(module, IMPURE), "time and effects come from an engine"


def test_rooms_form_no_circle() -> None:
    """Imports within functions and for type checkers count."""
    graph: dict[str, set[str]] = {room(name): set() for name in GRAPH}
    for name, found in GRAPH.items():
        graph[room(name)] |= {room(other) for other in found} - {room(name), *ROLES}
    TopologicalSorter(graph).prepare()


def test_rooms_are_small() -> None:
    sizes = Counter(room(name) for name in GRAPH if name.count(".") == 2 and ".v1." not in name)
    assert max(sizes.values()) <= 15, sizes.most_common(3)


TWO_MEANINGS = {
    # The interface of a command, which its module is imported for.
    *("add_arguments", "main", "make_parser", "run"),
    # The check of a document, and a range of a search.
    "choice",
    # The same word on both sides of the wire: what is described, and what a shard computes.
    "RowwiseAdagrad",
    *("count", "families", "serve"),
}


def test_a_public_name_is_defined_once() -> None:
    homes: dict[str, list[str]] = {}
    for module in GRAPH:
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                homes.setdefault(node.name, []).append(module)
    twice = {name for name, found in homes.items() if len(found) > 1 and name[0] != "_"}
    assert twice == TWO_MEANINGS, {name: homes.get(name) for name in twice ^ TWO_MEANINGS}


def test_the_page_says_what_each_room_owns() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+/\w+)` \| (.+) \|$", page, flags=re.MULTILINE))
    rooms = {room(name) for name in MODULES if name.count(".") == 2 and ".v1." not in name}
    assert rows.keys() == {name.replace(".", "/") for name in rooms}
    for name in rooms:
        (said, *_) = str(ast.get_docstring(ast.parse(MODULES[name].read_text()))).splitlines()
        said = re.sub(r":\w+:`([^`]+)`", r"`\1`", said).replace("``", "`")
        assert rows[name.replace(".", "/")] == said


@pytest.mark.slow
def test_commands_of_the_worker_import_tensorflow_only_when_they_silence_it() -> None:
    """Another gradient source needs none at all, and a mistake is reported within a second."""
    modules = (
        "worker.loop.performer",
        "worker.step.gradient_source",
        "worker.describe.describe",
        "worker.export.export",
        "worker.process.run",
    )
    code = f"import sys, {', '.join(modules)};print(*sorted({TENSORFLOW!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not ran.stdout.strip()
