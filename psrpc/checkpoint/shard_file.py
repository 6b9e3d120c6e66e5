"""One shard's file of a checkpoint: safetensors, readable by any tool that knows the format.

Tensor names are ``variable/NAME`` (the shard's slice of a variable, flat), ``slot/SLOT/NAME`` (the
same elements of an optimizer slot), ``whole/SLOT/NAME`` (a slot of another shape than its variable)
and ``scalar/NAME``. The metadata says, under the key ``psrpc`` and as JSON, where a slice lies in
its variable; tensor names are labels and never parsed. All of this is load-bearing.
:mod:`psrpc.checkpoint.shard_reader` reads the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.safetensors_form import Placed, header_bytes
from psrpc.core.batch import LOSS, MAX_VALUES
from psrpc.core.document import choice, listed, mapped, real, record, text, whole, wrong
from psrpc.core.errors import CheckpointError, disk_code
from psrpc.core.plan import Plan
from psrpc.core.tensor_form import shape
from psrpc.files.storage import DISK, Storage

NDArray = npt.NDArray[Any]

FORMAT = 1


@dataclass(frozen=True)
class ShardState:
    """The state of a shard, as stored in its file.

    Attributes:
        values: arena name -> ``[shard length]``.
        elements: slot name -> trainable arena name -> ``[shard length]``; arenas without elements
            on the shard may be left out.
        variables: slot name -> variable name -> array of a shape of its own.
        scalars: name -> ``[]``.
        version: number of updates applied.
        applied: the applied-set as plain JSON, one entry per epoch.
    """

    values: Mapping[str, NDArray]
    elements: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, NDArray]] = field(default_factory=dict)
    scalars: Mapping[str, NDArray] = field(default_factory=dict)
    version: int = 0
    applied: Sequence[Mapping[str, Any]] = ()


class Entry(TypedDict):
    """Describes one tensor of the file. ``start`` and ``stop`` count elements of the variable."""

    kind: Literal["variable", "slot", "whole", "scalar"]
    slot: str
    variable: str
    start: int
    stop: int
    shape: list[int]


@dataclass(frozen=True)
class ShardHeader:
    """The metadata of a shard's file."""

    shard: int
    shards: int
    plan_hash: str
    run_id: str
    generation: int
    global_step: int
    version: int
    applied: Sequence[Mapping[str, Any]]
    entries: Mapping[str, Entry]

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ShardHeader:
        """Reads the header from a file's metadata. Raises ValueError, which names the field."""
        found = dict(_HEADER(document, "its header"))
        if len({entry["epoch"] for entry in found["applied"]}) != len(found["applied"]):
            raise ValueError("applied has an epoch twice")
        del found["format"]
        return ShardHeader(**found)


def _intervals(value: Any, where: str) -> Any:
    """Checks that intervals ascend, so that building a :class:`psrpc.core.intervals.IntervalSet`
    takes time in proportion to their number."""
    end = 0
    for start, stop in _PAIRS(value, where):
        if not end <= start < stop:
            raise wrong([start, stop], where, f"an interval from {end} on")
        end = stop
    return value


_PAIRS = listed(listed(whole(), 2, 2))
_HEADER = record(
    {
        "format": whole(FORMAT, FORMAT),
        "shard": whole(),
        "shards": whole(),
        "plan_hash": text,
        "run_id": text,
        "generation": whole(),
        "global_step": whole(),
        "version": whole(),
        "applied": listed(
            record(
                {"epoch": whole(), "applied": _intervals, "skipped": _intervals},
                {"totals": listed(real, most=MAX_VALUES, least=LOSS)},
            )
        ),
        "entries": mapped(
            record(
                {
                    "kind": choice("variable", "slot", "whole", "scalar"),
                    "slot": text,
                    "variable": text,
                    "start": whole(),
                    "stop": whole(),
                    "shape": shape,
                }
            )
        ),
    }
)


@dataclass(frozen=True)
class WrittenFile:
    """Name, size and digest of a written file, for the manifest."""

    name: str
    nbytes: int
    sha256: str


def shard_file_name(shard: int, shards: int) -> str:
    """Returns the name of a shard's file within its checkpoint."""
    return f"shard-{shard}-of-{shards}.safetensors"


def write_shard_file(
    path: Path,
    plan: Plan,
    shard: int,
    state: ShardState,
    *,
    run_id: str,
    generation: int,
    global_step: int,
    storage: Storage = DISK,
) -> WrittenFile:
    """Writes the file, then syncs it and its directory to disk. Does not copy arrays.

    Raises:
        CheckpointError: the operating system refused; a partial file may remain. Callers do not try
            again, since the next checkpoint has files of its own.
    """
    tensors: list[tuple[str, Entry, NDArray]] = list(_tensors(plan, shard, state))
    header = {
        "format": FORMAT,
        "shard": shard,
        "shards": plan.shards,
        "plan_hash": plan.hash.hex(),
        "run_id": run_id,
        "generation": generation,
        "global_step": global_step,
        "version": state.version,
        "applied": list(state.applied),
        "entries": {name: entry for name, entry, _ in tensors},
    }
    head = header_bytes(header, (Placed(n, a.dtype.name, a.shape) for n, _, a in tensors))
    try:
        arrays = (array_bytes(array) for *_, array in tensors)
        written = storage.write(path, itertools.chain([head], arrays))
        storage.sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}", code=disk_code(error)
        ) from error
    return WrittenFile(path.name, written.nbytes, written.sha256)


def _tensors(plan: Plan, shard: int, state: ShardState) -> Iterator[tuple[str, Entry, NDArray]]:
    shapes = {v.name: list(v.shape) for v in plan.variables}
    for arena in plan.arenas:
        slots = [
            (s, arrays[arena.name]) for s, arrays in state.elements.items() if arena.name in arrays
        ]
        for piece in plan.shard_slices(arena, shard):
            name, size = piece.variable.name, piece.stop - piece.start
            place = slice(piece.offset, piece.offset + size)
            whole_shape = shapes[name]
            yield (
                f"variable/{name}",
                Entry(
                    kind="variable",
                    slot="",
                    variable=name,
                    start=piece.start,
                    stop=piece.stop,
                    shape=whole_shape,
                ),
                state.values[arena.name][place],
            )
            for slot, array in slots:
                yield (
                    f"slot/{slot}/{name}",
                    Entry(
                        kind="slot",
                        slot=slot,
                        variable=name,
                        start=piece.start,
                        stop=piece.stop,
                        shape=whole_shape,
                    ),
                    array[place],
                )
    for slot, arrays in state.variables.items():
        for name, array in arrays.items():
            yield (
                f"whole/{slot}/{name}",
                Entry(
                    kind="whole",
                    slot=slot,
                    variable=name,
                    start=0,
                    stop=array.size,
                    shape=list(array.shape),
                ),
                array,
            )
    for name, array in state.scalars.items():
        yield (
            f"scalar/{name}",
            Entry(kind="scalar", slot=name, variable="", start=0, stop=1, shape=[]),
            np.asarray(array),
        )


def array_bytes(array: NDArray) -> memoryview:
    """Returns the bytes of an array, row-major; a view if it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")
