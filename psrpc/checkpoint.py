"""Checkpoints: a directory with one file per shard and a manifest that is written last.

Only a verified manifest counts. The order of writing is: shards' files in a temporary directory,
each fsynced, and that directory; ``manifest.json`` with their sizes and SHA-256; rename to the
final name; fsync of the parent. A checkpoint of any number of shards loads into any other.

:mod:`psrpc.shard_file` has the form of a shard's file, :mod:`psrpc.manifest` the manifest's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.errors import CheckpointError
from psrpc.intervals import IntervalSet
from psrpc.manifest import (
    Choice,
    Manifest,
    ManifestFile,
    commit,
    newest_good,
    read_manifest,
    verify,
)
from psrpc.plan import ArenaPlan, Plan, aligned_empty
from psrpc.shard_file import (
    NDArray,
    ShardFile,
    ShardState,
    WrittenFile,
    shard_file_name,
    write_shard_file,
)

__all__ = [
    "Choice",
    "Manifest",
    "ManifestFile",
    "ShardState",
    "WrittenFile",
    "commit",
    "load_state",
    "load_variables",
    "newest_good",
    "read_manifest",
    "shard_file_name",
    "verify",
    "write_shard_file",
]


def load_state(directory: Path, plan: Plan, shard: int) -> ShardState:
    """What ``shard`` of ``plan`` takes over from a checkpoint of any number of shards.

    Arrays are aligned and the caller's own. With the checkpoint's own plan, version and
    applied-set are those of the same shard. With another one a shard gets parts of several, which
    in async mode may be some batches apart: it takes the highest version and the batches that all
    of them have, so that what only some have is trained again rather than lost.

    Raises:
        CheckpointError: the files are damaged, or hold other variables than the plan.
    """
    manifest = read_manifest(directory)
    verify(directory, manifest)
    _compare_variables(directory, manifest.plan, plan)
    values = {a.name: aligned_empty(a.shard_length(shard), a.dtype) for a in plan.arenas}
    targets = _targets(plan, shard)
    elements: dict[str, dict[str, NDArray]] = {}
    variables: dict[str, dict[str, NDArray]] = {}
    scalars: dict[str, NDArray] = {}
    filled = 0
    with _opened(directory, manifest) as files:
        for file in files:
            for name, entry in file.header.entries.items():
                if entry["kind"] == "scalar":
                    scalars.setdefault(entry["slot"], file.read(name))
                    continue
                target = targets.get(entry["variable"])
                if target is None:
                    continue
                arena, start, stop, offset = target
                if entry["kind"] == "whole":
                    variables.setdefault(entry["slot"], {})[entry["variable"]] = file.read(name)
                    continue
                low, high = max(start, entry["start"]), min(stop, entry["stop"])
                if low >= high:
                    continue
                if entry["kind"] == "variable":
                    array = values[arena.name]
                    filled += high - low
                else:
                    array = _slot_array(elements.setdefault(entry["slot"], {}), arena, shard)
                array[offset + low - start : offset + high - start] = file.read(name)[
                    low - entry["start"] : high - entry["start"]
                ]
        headers = [file.header for file in files]
    expected = sum(array.size for array in values.values())
    if filled != expected:
        raise CheckpointError(f"{directory} holds {filled} of shard {shard}'s {expected} elements")
    if manifest.plan.hash == plan.hash:
        headers = [h for h in headers if h.shard == shard]
    return ShardState(
        values=values,
        elements=elements,
        variables=variables,
        scalars=scalars,
        version=max(h.version for h in headers),
        applied=common_applied([h.applied for h in headers]),
    )


def load_variables(directory: Path, prefer_slot: str | None = None) -> dict[str, NDArray]:
    """Every variable whole: name -> array in its shape.

    Args:
        prefer_slot: take this optimizer slot's values in place of a variable's own where there
            are any (moving averages).

    Raises:
        CheckpointError: the files are damaged.
    """
    manifest = read_manifest(directory)
    verify(directory, manifest)
    specs = {v.name: v for v in manifest.plan.variables}
    arrays: dict[str, dict[str, NDArray]] = {"variable": {}, "slot": {}}
    filled = dict.fromkeys(specs, 0)
    with _opened(directory, manifest) as files:
        for file in files:
            for name, entry in file.header.entries.items():
                kind = entry["kind"]
                if kind not in arrays or (kind == "slot" and entry["slot"] != prefer_slot):
                    continue
                spec = specs[entry["variable"]]
                whole = arrays[kind].setdefault(spec.name, np.zeros(spec.size, spec.dtype))
                whole[entry["start"] : entry["stop"]] = file.read(name)
                filled[spec.name] += entry["stop"] - entry["start"] if kind == "variable" else 0
    for name, count in filled.items():
        if count != specs[name].size:
            raise CheckpointError(
                f"{directory} holds {count} of variable {name!r}'s {specs[name].size} elements"
            )
    return {
        name: (
            arrays["slot"].get(name, arrays["variable"].get(name, np.zeros(0, spec.dtype)))
        ).reshape(spec.shape)
        for name, spec in specs.items()
    }


def common_applied(
    sets: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, Any], ...]:
    """The batches that are in all of several applied-sets, in the same plain form."""
    epochs = [{entry["epoch"]: entry for entry in one} for one in sets]
    found = []
    for epoch in sorted(set.intersection(*(set(one) for one in epochs)) if epochs else ()):
        common = {"epoch": epoch}
        for key in ("applied", "skipped"):
            members = [IntervalSet((a, b) for a, b in one[epoch][key]) for one in epochs]
            shared = members[0]
            for other in members[1:]:
                shared = shared.intersection(other)
            common[key] = [[start, stop] for start, stop in shared]
        found.append(common)
    return tuple(found)


@contextmanager
def _opened(directory: Path, manifest: Manifest) -> Iterator[list[ShardFile]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ShardFile(directory / f.name)) for f in manifest.files]


def _targets(plan: Plan, shard: int) -> dict[str, tuple[ArenaPlan, int, int, int]]:
    """Variable name -> arena, first and last element on ``shard``, and where that lies in it."""
    return {
        piece.variable.name: (arena, piece.start, piece.stop, piece.offset)
        for arena in plan.arenas
        for piece in plan.shard_slices(arena, shard)
    }


def _slot_array(slot: dict[str, NDArray], arena: ArenaPlan, shard: int) -> NDArray:
    if arena.name not in slot:
        slot[arena.name] = aligned_empty(arena.shard_length(shard), arena.dtype)
        slot[arena.name].fill(0)
    return slot[arena.name]


def _compare_variables(directory: Path, mine: Plan, wanted: Plan) -> None:
    here = {v.name: (v.shape, v.dtype, v.role) for v in mine.variables}
    there = {v.name: (v.shape, v.dtype, v.role) for v in wanted.variables}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"{directory} has variable {name!r} as {_describe(here.get(name))};"
                f" the job has it as {_describe(there.get(name))}"
            )


def _describe(spec: tuple[tuple[int, ...], str, str] | None) -> str:
    return "none" if spec is None else f"{spec[2]} {spec[1]}{list(spec[0])}"
