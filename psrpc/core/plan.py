"""The plan: the place of every element of every variable, the same in all processes.

All variables of one dtype and role lie end to end in an *arena*, which is divided among the shards.
A worker has each whole arena as one flat array in the same order. So every variable is contiguous
in it, and so is every shard's part.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from psrpc.core.document import parse_json
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import INITIALIZERS, OPTIMIZERS, TableSpec
from psrpc.core.tensor_form import check_plan

Role = Literal["trainable", "state"]
Placement = Literal["cut", "whole"]

ALIGNMENT_BYTES = 64
"""Arenas are cut at multiples of this, so that a shard's part of an aligned array is aligned,
too."""

INTEGERS = "int64"
"""The dtype of the arena for integers of all widths and booleans; int64 represents all of them
exactly. An update replaces its values, see :attr:`ArenaPlan.replaced`. Load-bearing."""

DTYPES = ("float32", "float64", INTEGERS)
"""The dtypes of arenas; :func:`check_variables` refuses variables of other dtypes."""

AVERAGES = "model_variables_moving_average"
"""The per-element slot of an optimizer with ``use_ema``. Persisted name, load-bearing.

A checkpoint contains the raw parameters, so training resumes exactly. Keras replaces the trainable
variables by their averages when ``fit`` ends (``finalize_variable_values``). Here an export uses
this slot instead of the trainable arenas, but only if ``iterations`` is above 0, since the slot is
all zeros before the first step. Evaluations use the raw parameters, as in Keras during ``fit``. A
reader need not care about ``ema_overwrite_frequency``: the shard's update overwrites the parameters
at the same iterations as Keras.
"""

MEAN_SQUARE = "dc_mean_square"
"""The slot of delay compensation, for any optimizer. Persisted name, load-bearing."""


@dataclass(frozen=True)
class VariableSpec:
    """One model variable. ``constraint`` is a serialized Keras constraint or None."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    constraint: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """Elements ``[start, stop)`` of a flattened variable, which begin at ``offset`` in a shard's
    part of an arena."""

    variable: VariableSpec
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class ArenaPlan:
    """One arena. Variable ``order[i]`` (an index into the plan's variables) starts at element
    ``starts[i]``; shard k owns elements ``[cuts[k], cuts[k+1])``."""

    name: str
    dtype: str
    role: Role
    order: tuple[int, ...]
    starts: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements in the whole arena, over all shards."""
        return self.cuts[-1]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return np.dtype(self.dtype).itemsize

    @property
    def encodable(self) -> bool:
        """Whether its elements may travel in another encoding than plain (psrpc.core.encoding)."""
        return (self.dtype, self.role) == ("float32", "trainable")

    @property
    def replaced(self) -> bool:
        """Whether an update replaces its elements instead of adding a gradient or a difference. It
        does for integers, since the mean of two counters is meaningless."""
        return self.dtype == INTEGERS

    def shard_length(self, shard: int) -> int:
        """Returns the number of elements of the arena on ``shard``."""
        return self.cuts[shard + 1] - self.cuts[shard]


@dataclass(frozen=True)
class Plan:
    """The layout of all variables over all shards. Immutable; equal plans have equal hashes.

    Attributes:
        slices: how many of the shards, the last ones, have all arenas and no rows; the others have
            rows only. 0 if each shard has its part of both.
    """

    variables: tuple[VariableSpec, ...]
    arenas: tuple[ArenaPlan, ...]
    shards: int
    placement: Placement
    tables: tuple[TableSpec, ...] = ()
    slices: int = 0

    @property
    def row_shards(self) -> int:
        """Over how many shards, the first ones, the rows of tables are spread."""
        return self.shards - self.slices

    @property
    def dense_shards(self) -> int:
        """Over how many shards, the last ones, the arenas are divided."""
        return self.slices or self.shards

    def tables_on(self, shard: int) -> tuple[TableSpec, ...]:
        """Returns the tables of which ``shard`` may have rows."""
        return self.tables if shard < self.row_shards else ()

    def shard_slices(self, arena: ArenaPlan, shard: int) -> list[Slice]:
        """Returns the slices of variables that lie in ``arena`` on ``shard``, in arena order."""
        low, high = arena.cuts[shard], arena.cuts[shard + 1]
        slices = []
        for index, first in zip(arena.order, arena.starts, strict=True):
            variable = self.variables[index]
            start, stop = max(first, low), min(first + variable.size, high)
            if start < stop:
                slices.append(Slice(variable, start - first, stop - first, start - low))
        return slices

    def shard_nbytes(self, shard: int) -> int:
        """Returns the bytes of parameters and state on ``shard``, without optimizer slots and
        tables."""
        return sum(arena.shard_length(shard) * arena.itemsize for arena in self.arenas)

    def to_json(self) -> bytes:
        """Returns the canonical JSON that is hashed and sent."""
        document: dict[str, Any] = {
            "format": 1,
            "shards": self.shards,
            "placement": self.placement,
            "variables": [vars(v) | {"shape": list(v.shape)} for v in self.variables],
            "arenas": [vars(a) for a in self.arenas],
        }
        if self.tables:
            # Omitted if there are none, so that plans without tables keep their hash from before
            # tables existed.
            document["tables"] = [table.to_json() for table in self.tables]
        if self.slices:
            document["slices"] = self.slices
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON; part of every RPC that touches parameters."""
        return hashlib.sha256(self.to_json()).digest()

    @staticmethod
    def from_json(data: bytes) -> Plan:
        """The inverse of :meth:`to_json`.

        Raises:
            InvalidJob: ``data`` is not a plan; names the invalid field or the contradiction.
        """
        try:
            return Plan.from_document(parse_json(data))
        except ValueError as error:
            raise InvalidJob(f"that is no plan: {error}") from None

    @staticmethod
    def from_document(document: Any) -> Plan:
        """Reads a plan from a JSON value. Raises ValueError or InvalidJob."""
        check_plan(document)
        plan = Plan(
            variables=tuple(
                VariableSpec(**(v | {"shape": tuple(v["shape"])})) for v in document["variables"]
            ),
            arenas=tuple(
                ArenaPlan(**(a | {key: tuple(a[key]) for key in ("order", "starts", "cuts")}))
                for a in document["arenas"]
            ),
            shards=document["shards"],
            placement=document["placement"],
            tables=tuple(TableSpec.from_json(table) for table in document.get("tables", ())),
            slices=document.get("slices", 0),
        )
        check_variables(plan.variables)
        check_table_specs(plan.tables)
        return plan


def aligned_nbytes(nbytes: int) -> int:
    """Rounds ``nbytes`` up to a multiple of ``ALIGNMENT_BYTES``."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_empty(length: int, dtype: str) -> npt.NDArray[Any]:
    """Makes an uninitialized ``[length]`` array on a 64-byte boundary.

    TensorFlow aborts the process if it gets an unaligned buffer by DLPack, so every buffer that may
    reach TensorFlow has to be made here.
    """
    nbytes = length * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + nbytes].view(dtype)


def check_variables(variables: Sequence[VariableSpec]) -> None:
    """Raises InvalidJob if variables have the same name or an unusable dtype."""
    for name, uses in Counter(v.name for v in variables).items():
        if uses > 1:
            raise InvalidJob(f"{uses} variables are named {name!r}; give their layers names")
    for v in variables:
        if v.dtype not in DTYPES:
            raise InvalidJob(
                f"variable {v.name!r} has dtype {v.dtype}; shards hold {', '.join(DTYPES)}"
            )
        if v.dtype == INTEGERS and v.role == "trainable":
            raise InvalidJob(f"variable {v.name!r} is trainable and {v.dtype}; expected a float")


def check_table_specs(tables: Sequence[TableSpec]) -> None:
    """Raises InvalidJob if tables have the same name or impossible settings."""
    for name, uses in Counter(table.name for table in tables).items():
        if uses > 1:
            raise InvalidJob(f"{uses} tables are named {name!r}; give them different names")
    for table in tables:
        for what, value in (
            ("width", table.width),
            ("vocabulary", table.vocabulary),
            ("max_rows", table.max_rows),
            ("min_count", table.min_count),
        ):
            if value is not None and value < 1:
                raise InvalidJob(f"table {table.name!r} has {what} {value}; expected at least 1")
        for what, found, known in (
            ("initializer", table.initializer["class_name"], INITIALIZERS),
            ("optimizer", table.optimizer["class_name"], OPTIMIZERS),
        ):
            if found not in known:
                raise InvalidJob(
                    f"table {table.name!r} has {what} {found}; expected {' or '.join(known)}"
                )
        if table.eviction is not None and table.max_rows is None:
            raise InvalidJob(
                f"table {table.name!r} evicts rows by {table.eviction}, but has no max_rows"
            )
        if table.keep_evicted and table.eviction is None:
            raise InvalidJob(f"table {table.name!r} keeps evicted rows, but evicts none")
