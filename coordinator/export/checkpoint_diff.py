"""Compares the contents of two checkpoints, whatever the number of their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.checkpoint.checkpoint import ShardState, read_manifest
from psrpc.checkpoint.evicted_file import evicted_sizes
from psrpc.checkpoint.load import check_room, load_state
from psrpc.checkpoint.manifest import Manifest
from psrpc.checkpoint.rows_chain import load_table
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.intervals import IntervalSet
from psrpc.core.placement import make_plan
from psrpc.core.text import counted


@dataclass(frozen=True)
class ArrayDifference:
    """Two different arrays of one name. ``norm`` is the Euclidean norm of their difference,
    ``greatest`` its greatest magnitude; both are NaN if the shapes differ or one is missing."""

    name: str
    shape: str
    norm: float
    greatest: float


@dataclass(frozen=True)
class Difference:
    """``facts`` are lines on differences outside arrays; ``equal`` counts bitwise equal arrays."""

    facts: tuple[str, ...]
    arrays: tuple[ArrayDifference, ...]
    equal: int

    @property
    def differs(self) -> bool:
        """Whether the checkpoints differ at all."""
        return bool(self.facts or self.arrays)


def diff_checkpoints(one: Path, other: Path) -> Difference:
    """Compares two checkpoints; both are held in memory.

    Raises:
        CheckpointError: one is damaged or not a checkpoint.
    """
    manifests = read_manifest(one), read_manifest(other)
    states = _load(one, manifests[0]), _load(other, manifests[1])
    arrays, equal = _compare_arrays(
        *(_arrays(m, s) for m, s in zip(manifests, states, strict=True))
    )
    facts = [
        f"{name}: {ours} and {theirs}"
        for name, ours, theirs in (
            ("run", *(m.run_id for m in manifests)),
            ("generation", *(m.generation for m in manifests)),
            ("global step", *(m.global_step for m in manifests)),
            ("shards", *(m.plan.shards for m in manifests)),
            ("slices", *(m.plan.slices for m in manifests)),
            ("versions", *([f.version for f in m.files] for m in manifests)),
            ("mode", *(m.mode for m in manifests)),
            ("batch size", *(m.batch_size for m in manifests)),
            ("data", *(m.data_fingerprint for m in manifests)),
            ("optimizer", *(m.optimizer for m in manifests)),
            (
                "evicted rows",
                *(evicted_sizes(p, m) for p, m in zip((one, other), manifests, strict=True)),
            ),
        )
        if ours != theirs
    ]
    facts += _compare_applied(states[0].applied, states[1].applied)
    tables = [{table.name: table for table in m.plan.tables} for m in manifests]
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        found = [
            load_table(path, name) if name in there else None
            for path, there in zip((one, other), tables, strict=True)
        ]
        more, different, same = compare_rows(name, found[0], found[1])
        facts += more
        arrays += different
        equal += same
    return Difference(tuple(facts), tuple(arrays), equal)


def _load(directory: Path, manifest: Manifest) -> ShardState:
    check_room(directory, manifest)
    plan = make_plan(manifest.plan.variables, 1, "cut", manifest.plan.tables)
    return load_state(directory, plan, 0)


def _arrays(manifest: Manifest, state: ShardState) -> dict[str, NDArray]:
    """Returns all arrays by their names in the files, whole and in shape."""
    plan = make_plan(manifest.plan.variables, 1, "cut", manifest.plan.tables)
    found: dict[str, NDArray] = {}
    for arena in plan.arenas:
        for piece in plan.shard_slices(arena, 0):
            variable = piece.variable
            place = slice(piece.offset, piece.offset + variable.size)
            found[variable.name] = state.values[arena.name][place].reshape(variable.shape)
            for slot, elements in state.elements.items():
                if arena.name in elements:
                    found[f"{slot} of {variable.name}"] = elements[arena.name][place].reshape(
                        variable.shape
                    )
    for slot, variables in state.variables.items():
        found |= {f"{slot} of {name}": array for name, array in variables.items()}
    return found | {name: np.asarray(array) for name, array in state.scalars.items()}


def _compare_arrays(
    ours: Mapping[str, NDArray], theirs: Mapping[str, NDArray]
) -> tuple[list[ArrayDifference], int]:
    found = []
    equal = 0
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or one.shape != other.shape:
            shapes = " and ".join("none" if a is None else str(list(a.shape)) for a in (one, other))
            found.append(ArrayDifference(name, shapes, np.nan, np.nan))
        elif one.tobytes() == other.tobytes():
            equal += 1
        else:
            apart = one.astype("float64") - other.astype("float64")
            found.append(
                ArrayDifference(
                    name,
                    str(list(one.shape)),
                    float(np.linalg.norm(apart)),
                    float(np.max(np.abs(apart))),
                )
            )
    return found, equal


def compare_rows(
    name: str, one: RowsBlock | None, other: RowsBlock | None
) -> tuple[list[str], list[ArrayDifference], int]:
    """Returns facts, differences and the number of equal columns of two tables whose ids ascend."""
    if one is None or other is None:
        sizes = ["none" if rows is None else counted(rows.ids.size, "row") for rows in (one, other)]
        return [f"table {name}: {sizes[0]} and {sizes[1]}"], [], 0
    both, ours, theirs = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    facts = []
    if not both.size == one.ids.size == other.ids.size:
        both_sizes = f"{one.ids.size} and {counted(other.ids.size, 'row')}"
        facts = [f"table {name}: {both_sizes}, {both.size} in both"]
    columns = [
        {f"rows of {name}": rows.values[at]}
        | {f"{slot} of {name}": array[at] for slot, array in rows.slots.items()}
        | {f"counts of {name}": rows.counts[at]}
        for rows, at in ((one, ours), (other, theirs))
    ]
    return facts, *_compare_arrays(*columns)


def _compare_applied(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> list[str]:
    lines = []
    epochs = [{entry["epoch"]: entry for entry in one} for one in (ours, theirs)]
    for epoch in sorted(epochs[0].keys() | epochs[1].keys()):
        for kind in ("applied", "skipped"):
            one, other = (
                IntervalSet((a, b) for a, b in one.get(epoch, {}).get(kind, ())) for one in epochs
            )
            if one != other:
                both = len(one.intersection(other))
                lines.append(
                    f"epoch {epoch + 1}: {len(one)} and {len(other)} positions {kind}, "
                    f"{both} in both"
                )
    return lines
