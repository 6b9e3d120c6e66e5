"""``coordinator checkpoint``: lists, verifies, compares and prunes a run's checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.checkpoints.checkpoints import WRITTEN_UTC
from coordinator.checkpoints.pruning import (
    Pruner,
    as_kept,
    described_job,
    objective_of,
    run_checkpoints,
    scores_of,
)
from coordinator.core.retention import Objective, best_of
from coordinator.core.wording import duration
from coordinator.export.checkpoint_diff import diff_checkpoints
from coordinator.records.run_directory import RunDirectory
from psrpc.checkpoint.checkpoint import check_file
from psrpc.checkpoint.choice import FoundCheckpoints, find_checkpoints
from psrpc.checkpoint.evicted_file import check_evicted, evicted_sizes
from psrpc.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from psrpc.checkpoint.rows_chain import check_chain, table_sizes
from psrpc.core.errors import CheckpointError, InvalidArgument, PsError, error_line
from psrpc.core.names import CHECKPOINTS
from psrpc.core.text import sanitize
from psrpc.files.run_paths import newest_run

UNLIMITED = 1 << 16
"""Width in columns for output that is not a terminal."""


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status: 0, 1 when something is bad or differs, 2 after
    one line on standard error."""
    try:
        return _ACTIONS[args.action](args)
    except PsError as error:
        print(error_line(error), file=sys.stderr)  # noqa: T201
        return 2


def _ls(args: argparse.Namespace) -> int:
    found = run_checkpoints(args.run_dir)
    rows = list_checkpoints(found, objective_of(args.run_dir), args.run_dir, datetime.now(UTC))
    if args.json:
        print(json.dumps(rows, indent=1))  # noqa: T201
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    tables = any(row["tables"] for row in rows)
    for title in ("name", "generation", "step", "written", "size", *["rows"] * tables, ""):
        right = title in ("generation", "step", "size")
        table.add_column(title, justify="right" if right else "left", no_wrap=bool(title))
    for row in rows:
        age = row["age_s"]
        table.add_row(
            row["name"],
            str(row["generation"]),
            str(row["global_step"]),
            "" if age is None else f"{duration(age)} ago",
            f"{row['nbytes'] / 1e6:.1f} MB",
            *[Text(sanitize(_rows(row["tables"], row["evicted"])))] * tables,
            Text(", ".join(row["marks"]), "green"),
        )
    _console().print(table if rows else "no checkpoints")
    for path, reason in found.refused:
        _say(path.name, reason, "red")
    return 0


def list_checkpoints(
    found: FoundCheckpoints, objective: Objective | None, run_dir: Path, now: datetime
) -> list[dict[str, Any]]:
    """Returns one row for each manifest, newest first, as ``ls --json`` prints them. Reads files
    only for their table sizes, so the newest checkpoint may still be damaged."""
    scores = scores_of(run_dir, objective)
    best = best_of(as_kept(found), objective, scores)
    rows = []
    for index, (path, manifest) in enumerate(found.manifests):
        marks = ["newest"] if index == 0 else []
        if manifest.name == best:
            marks.append("best")
        rows.append(
            {
                "name": manifest.name,
                "path": str(path),
                "generation": manifest.generation,
                "global_step": manifest.global_step,
                "shards": manifest.plan.shards,
                WRITTEN_UTC: manifest.details.get(WRITTEN_UTC),
                "age_s": _age_s(manifest, now),
                "nbytes": manifest.nbytes,
                "tables": _sizes(table_sizes, path, manifest),
                "evicted": _sizes(evicted_sizes, path, manifest),
                "score": scores.get((manifest.generation, manifest.global_step)),
                "marks": marks,
            }
        )
    return rows


def _rows(tables: Mapping[str, int], evicted: Mapping[str, int]) -> str:
    shown = []
    for name, count in tables.items():
        gone = f" ({evicted[name]} evicted)" if name in evicted else ""
        shown.append(f"{name} {count}{gone}")
    return ", ".join(shown)


def _verify(args: argparse.Namespace) -> int:
    source = Path(os.path.realpath(args.source))
    if (source / MANIFEST).exists():
        checkpoints, refused = [(source, read_manifest(source))], []
    else:
        found = run_checkpoints(source)
        checkpoints, refused = list(found.manifests), list(found.refused)
    bad = bool(refused)
    newest = ""
    for path, manifest in checkpoints:
        whole = True
        for file in manifest.files:
            whole &= _says_good(
                f"{path.name}/{file.name}", partial(check_file, path, manifest, file)
            )
            if file.rows:
                more = f" and {len(file.rows) - 1} more" if len(file.rows) > 1 else ""
                names = f"{path.name}/{file.rows[0].name}{more}"
                whole &= _says_good(names, partial(check_chain, path, manifest, file))
            if file.evicted is not None:
                name = f"{path.name}/{file.evicted.name}"
                whole &= _says_good(name, partial(check_evicted, path, manifest, file))
        bad = bad or not whole
        newest = newest or (path.name if whole else "")
    for path, reason in refused:
        _say(path.name, reason, "red")
    _console().print(f"the newest good one is {newest or 'none'}", soft_wrap=True)
    return 1 if bad or not newest else 0


def _says_good(what: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except CheckpointError as error:
        _say(what, error.coded, "red")
        return False
    _say(what, "good", "green")
    return True


def _diff(args: argparse.Namespace) -> int:
    run_dir = args.run_dir or newest_run()
    difference = diff_checkpoints(*(_named(one, run_dir) for one in (args.one, args.other)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "shape", "norm of difference", "greatest difference"):
        table.add_column(title, justify="right" if "difference" in title else "left", no_wrap=True)
    for row in difference.arrays:
        table.add_row(
            Text(sanitize(row.name)), Text(row.shape), f"{row.norm:.6g}", f"{row.greatest:.6g}"
        )
    for line in difference.facts:
        _console().print(Text(sanitize(line)), soft_wrap=True)
    if difference.arrays:
        _console().print(table)
    _console().print(f"{difference.equal} equal, {len(difference.arrays)} different arrays")
    return 1 if difference.differs else 0


def _named(name: Path, run_dir: Path | None) -> Path:
    """Returns the directory ``name`` or, if it does not exist, the checkpoint of that name."""
    if run_dir is not None and not name.exists():
        name = run_dir / CHECKPOINTS / name
    return Path(os.path.realpath(name))


def _prune(args: argparse.Namespace) -> int:
    run_dir: Path = args.run_dir
    if args.keep is not None and args.keep < 1:
        raise InvalidArgument(f"--keep is {args.keep}; expected a whole number of at least 1")
    run_checkpoints(run_dir)
    with RunDirectory(run_dir, resume=True):
        description = described_job(run_dir)
        keep = args.keep or description.keep_checkpoints
        pruner = Pruner(run_dir / CHECKPOINTS, keep, description.keep_best)
        scores = scores_of(run_dir, description.keep_best)
        removable = pruner.find(scores)
        failed = [] if args.dry_run else pruner.remove(removable)
        for warning in (*removable.warnings, *failed):
            print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    there = {path.name for path, _ in find_checkpoints(run_dir / CHECKPOINTS).manifests}
    for name in removable.names:
        if args.dry_run:
            _say(name, "would be removed", "yellow")
        elif name not in there:
            _say(name, "removed", "yellow")
    left = len(there - set(removable.names) if args.dry_run else there)
    _console().print(f"{left} left")
    return 1 if failed else 0


def _sizes(
    sizes: Callable[[Path, Manifest], dict[str, int]], directory: Path, manifest: Manifest
) -> dict[str, int]:
    """Returns rows by table; empty if the files cannot be read."""
    try:
        return sizes(directory, manifest)
    except CheckpointError:
        return {}


def _age_s(manifest: Manifest, now: datetime) -> float | None:
    try:
        written = datetime.fromisoformat(str(manifest.details.get(WRITTEN_UTC)))
        return round((now - written).total_seconds(), 1)
    except (ValueError, TypeError):
        return None


def _say(what: str, how: str, style: str) -> None:
    _console().print(Text.assemble(f"{sanitize(what)}  ", (sanitize(how), style)), soft_wrap=True)


def _console() -> Console:
    # Made anew each time: a console is bound to the present standard output.
    console = Console(highlight=False)
    if not console.is_terminal:
        # Programs and files get whole names.
        console.width = UNLIMITED
    return console


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
}
