"""Loads the state of a shard, or whole variables, from the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.checkpoint.directory import check_size
from psrpc.checkpoint.manifest import (
    Manifest,
    ManifestFile,
    check_identity,
    read_manifest,
)
from psrpc.checkpoint.rows_chain import compare_tables
from psrpc.checkpoint.shard_file import (
    NDArray,
    ShardHeader,
    ShardState,
)
from psrpc.checkpoint.shard_reader import ShardReader, Tensor
from psrpc.core.errors import CheckpointError
from psrpc.core.intervals import IntervalSet
from psrpc.core.plan import ArenaPlan, Plan, VariableSpec, aligned_empty
from psrpc.files.storage import DISK, Storage, unreadable


def load_state(
    directory: Path,
    plan: Plan,
    shard: int,
    run_id: str | None = None,
    storage: Storage = DISK,
) -> ShardState:
    """Loads the state of ``shard`` of ``plan`` from a checkpoint of any number of shards, except
    the rows of tables: :func:`psrpc.checkpoint.rows_chain.load_rows` loads those.

    The caller owns the arrays, which are aligned. With the plan of the checkpoint only the file of
    that shard is read. With another plan a shard gets parts of several files, which in async mode
    may be some batches apart: it takes the highest version and the batches that all files have, so
    that the other batches are trained again rather than lost.

    Args:
        directory: a checkpoint under the name that it was committed with.
        run_id: the run to which the checkpoint must belong; None for any.

    Raises:
        CheckpointError: the files are damaged, of another checkpoint, or hold other variables than
            the plan, or tables that it has otherwise.
    """
    manifest = read_manifest(directory, storage)
    check_identity(directory, manifest, run_id)
    compare_variables(directory, manifest.plan.variables, plan.variables)
    compare_tables(directory, manifest.plan.tables, plan.tables)
    own = manifest.plan.hash == plan.hash
    loading = _Loading(plan, shard)
    headers = []
    for file in manifest.files:
        if own and file.shard != shard:
            continue
        with opened(directory, manifest, file, storage) as reader:
            for tensor in reader:
                loading.take(reader, tensor)
            headers.append(reader.header)
    expected = sum(array.size for array in loading.values.values())
    if loading.filled != expected:
        raise CheckpointError(
            f"{directory} holds {loading.filled} of shard {shard}'s {expected} elements"
        )
    return ShardState(
        values=loading.values,
        elements=loading.elements,
        variables=loading.variables,
        scalars=loading.scalars,
        version=max(h.version for h in headers),
        applied=common_applied([h.applied for h in headers]),
    )


def load_variables(
    directory: Path, prefer_slot: str | None = None, storage: Storage = DISK
) -> dict[str, NDArray]:
    """Returns whole variables: name -> array in its shape.

    Args:
        prefer_slot: an optimizer slot (moving averages) whose values replace those of the variables
            that have it.

    Raises:
        CheckpointError: the files are damaged.
    """
    manifest = read_manifest(directory, storage)
    check_room(directory, manifest, storage)
    specs = {v.name: v for v in manifest.plan.variables}
    arrays: dict[str, dict[str, NDArray]] = {"variable": {}, "slot": {}}
    filled = dict.fromkeys(specs, 0)
    for file in manifest.files:
        with opened(directory, manifest, file, storage) as reader:
            for tensor in reader:
                entry, kind = tensor.entry, tensor.entry["kind"]
                if kind not in arrays or (kind == "slot" and entry["slot"] != prefer_slot):
                    continue
                if entry["variable"] not in specs:
                    raise CheckpointError(f"{reader.path} has no variable {entry['variable']!r}")
                spec = specs[entry["variable"]]
                whole = arrays[kind].setdefault(spec.name, np.zeros(spec.size, spec.dtype))
                reader.fill(tensor, whole[entry["start"] : entry["stop"]])
                filled[spec.name] += tensor.size if kind == "variable" else 0
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


class _Loading:
    """The state of one shard during loading."""

    def __init__(self, plan: Plan, shard: int) -> None:
        self._shard = shard
        self._places = {
            piece.variable.name: (arena, piece)
            for arena in plan.arenas
            for piece in plan.shard_slices(arena, shard)
        }
        self.values = {a.name: aligned_empty(a.shard_length(shard), a.dtype) for a in plan.arenas}
        self.elements: dict[str, dict[str, NDArray]] = {}
        self.variables: dict[str, dict[str, NDArray]] = {}
        self.scalars: dict[str, NDArray] = {}
        self.filled = 0
        """Number of elements of ``values`` that have been read."""

    def take(self, reader: ShardReader, tensor: Tensor) -> None:
        """Reads the shard's part of ``tensor``. Raises CheckpointError."""
        entry = tensor.entry
        if entry["kind"] == "scalar":
            self.scalars.setdefault(entry["slot"], reader.read(tensor))
            return
        if entry["variable"] not in self._places:
            return
        arena, piece = self._places[entry["variable"]]
        if entry["kind"] == "whole":
            slot = self.variables.setdefault(entry["slot"], {})
            slot[entry["variable"]] = reader.read(tensor)
            return
        low, high = max(piece.start, entry["start"]), min(piece.stop, entry["stop"])
        if low >= high:
            return
        if entry["kind"] == "variable":
            array = self.values[arena.name]
            self.filled += high - low
        else:
            array = self._slot(entry["slot"], arena)
        at = piece.offset - piece.start
        reader.fill(tensor, array[at + low : at + high], low - entry["start"])

    def _slot(self, name: str, arena: ArenaPlan) -> NDArray:
        slot = self.elements.setdefault(name, {})
        if arena.name not in slot:
            slot[arena.name] = aligned_empty(arena.shard_length(self._shard), arena.dtype)
            slot[arena.name].fill(0)
        return slot[arena.name]


def opened(
    directory: Path, manifest: Manifest, file: ManifestFile, storage: Storage
) -> ShardReader:
    """Opens a file of the checkpoint and checks that its header fits the manifest."""
    reader = ShardReader(directory / file.name, file.nbytes, file.sha256, storage)
    try:
        _check_header(reader.path, reader.header, manifest, file)
        _check_entries(reader, manifest.plan, file.shard)
    except CheckpointError:
        reader.close()
        raise
    return reader


def _check_header(path: Path, header: ShardHeader, manifest: Manifest, file: ManifestFile) -> None:
    for name, found, expected in (
        ("shard", header.shard, file.shard),
        ("version", header.version, file.version),
        ("plan_hash", header.plan_hash, manifest.plan.hash.hex()),
        ("run_id", header.run_id, manifest.run_id),
        ("generation", header.generation, manifest.generation),
        ("global_step", header.global_step, manifest.global_step),
    ):
        if found != expected:
            raise CheckpointError(f"{path} is of {name} {found!r}; its manifest says {expected!r}")


def _check_entries(reader: ShardReader, plan: Plan, shard: int) -> None:
    """Checks that a file has each element of the shard's variables once, and all or none of a
    slot's elements: memory for missing ones would be uninitialized. Raises CheckpointError."""
    specs = {v.name: v for v in plan.variables}
    pieces = {
        piece.variable.name: (piece.start, piece.stop)
        for arena in plan.arenas
        for piece in plan.shard_slices(arena, shard)
    }
    found = set()
    for tensor in reader.tensors:
        entry = tensor.entry
        kind, variable = entry["kind"], entry["variable"]
        key = (kind, entry["slot"], variable)
        fits = key not in found and (bool(entry["slot"]) != (kind == "variable"))
        found.add(key)
        if kind == "scalar":
            fits &= not variable and tensor.size == 1
        elif kind == "whole":
            fits &= variable in specs
        else:
            fits &= (entry["start"], entry["stop"]) == pieces.get(variable)
            fits = fits and tensor.dtype == specs[variable].dtype
        if not fits:
            raise CheckpointError(
                f"{reader.path} has {tensor.name!r}, {tensor.dtype}{list(tensor.shape)}, as "
                f"{kind} {entry['slot']!r} of {variable!r}, which shard {shard} cannot have"
            )
    missing = [name for name in pieces if ("variable", "", name) not in found]
    if missing:
        raise CheckpointError(f"{reader.path} has nothing of variable {missing[0]!r}")


def check_room(directory: Path, manifest: Manifest, storage: Storage = DISK) -> None:
    """Checks that files have the sizes in the manifest, and that these are large enough for the
    plan's arrays. Call it before allocating memory. Raises CheckpointError."""
    for file in manifest.files:
        expected = manifest.plan.shard_nbytes(file.shard)
        if file.nbytes < expected:
            raise CheckpointError(
                f"{directory / file.name} has {file.nbytes} bytes; the variables of its shard have "
                f"{expected}"
            )
        try:
            check_size(directory, file.every[0], storage)
        except OSError as error:
            raise CheckpointError(unreadable(directory / file.name, error)) from error


def common_applied(
    sets: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, Any], ...]:
    """Returns the batches that several applied-sets have in common, as plain JSON.

    The totals of an epoch are those of the first set that has some. They include batches that the
    other sets lack; when these batches are trained again, they are counted a second time."""
    epochs = [{entry["epoch"]: entry for entry in one} for one in sets]
    found = []
    for epoch in sorted(set.intersection(*(set(one) for one in epochs)) if epochs else ()):
        common: dict[str, Any] = {"epoch": epoch}
        for key in ("applied", "skipped"):
            members = [IntervalSet((a, b) for a, b in one[epoch][key]) for one in epochs]
            shared = members[0]
            for other in members[1:]:
                shared = shared.intersection(other)
            common[key] = [[start, stop] for start, stop in shared]
        totals = [one[epoch]["totals"] for one in epochs if "totals" in one[epoch]]
        if totals:
            common["totals"] = totals[0]
        found.append(common)
    return tuple(found)


def compare_variables(
    directory: Path, here: Iterable[VariableSpec], wanted: Iterable[VariableSpec]
) -> None:
    """Checks that a job's variables have the names, shapes and dtypes of a checkpoint's.

    Raises:
        CheckpointError: names the first variable that differs, and both shapes.
    """
    found = {v.name: (v.shape, v.dtype, v.role) for v in here}
    expected = {v.name: (v.shape, v.dtype, v.role) for v in wanted}
    for name in sorted(found.keys() | expected.keys()):
        one, other = found.get(name), expected.get(name)
        if one == other:
            continue
        hint = ""
        if one and other and len(one[0]) == len(other[0]) and one[1:] == other[1:]:
            hint = " (was a vocabulary or another size of a layer changed?)"
        raise CheckpointError(
            f"{directory} has variable {name!r} as {_describe(one)}; the job has it as "
            f"{_describe(other)}{hint}: set it back, or start a new run",
            code="PS405",
        )


def _describe(spec: tuple[tuple[int, ...], str, str] | None) -> str:
    return "none" if spec is None else f"{spec[2]} {spec[1]}{list(spec[0])}"
