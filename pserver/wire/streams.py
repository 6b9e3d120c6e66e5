"""Converts the headers and tensors of message streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from pserver.core.assembly import Extent
from pserver.core.requests import LookedUp, Values
from pserver.core.table_ids import TableIds
from pserver.tables.tables import TableFigures
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.bounds import check_bounds


def pulled_parts(
    plan: Plan, rows: TableIds, arrays: Sequence[npt.NDArray[np.float32]]
) -> list[tuple[int, memoryview]]:
    """Returns pairs of extent index and bytes for pulled rows; ``arrays`` has a contiguous ``[n,
    width]`` per table of ``rows``."""
    first = len(plan.arenas)
    return [
        (first + table, array.reshape(-1).view(np.uint8).data)
        for (table, _), array in zip(rows, arrays, strict=True)
    ]


def pushed_parts(
    plan: Plan, ids: TableIds, rows: Mapping[int, Rows]
) -> list[tuple[int, memoryview]]:
    """Returns pairs of extent index and bytes for the pushed rows of ``ids``."""
    arrays = [np.ascontiguousarray(rows[table].values) for table, _ in ids]
    return pulled_parts(plan, ids, arrays)


def to_tables(figures: Iterable[TableFigures]) -> list[pb.TableStatus]:
    """Encodes figures of tables."""
    return [pb.TableStatus(**asdict(f)) for f in figures]


def to_looked_up(found: LookedUp) -> pb.LookUpResponse:
    """Encodes the result of a look-up."""
    return pb.LookUpResponse(
        version=found.version,
        generation=found.generation,
        rows=found.rows.tobytes(),
        present=found.present.astype(np.uint8).tobytes(),
    )


def parse_header(data: bytes, header: type[Header]) -> Header:
    """Decodes a message of class ``header``; raises InvalidArgument if the bytes are malformed, or
    a field is longer than allowed (:mod:`psrpc.wire.bounds`)."""
    try:
        message = header.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a header cannot be read as {header.__name__}: {error}") from None
    check_bounds(message, len(data))
    return message


def announced_nbytes(extents: Iterable[types.Extent]) -> int:
    """Returns the number of chunk bytes that follow a header with ``extents``."""
    return sum(extent.nbytes for extent in extents)


def value_parts(plan: Plan, values: Values, rows: TableIds = ()) -> list[tuple[int, memoryview]]:
    """Returns pairs of extent index and bytes for pulled values: all arenas in plan order, except
    empty ones, then ``values.rows``, which belong to the ids in ``rows``."""
    parts = [
        (index, values.arrays[arena.name].view(np.uint8).data)
        for index, arena in enumerate(plan.arenas if values.arrays else ())
        if values.arrays[arena.name].size
    ]
    if rows:
        parts.extend(pulled_parts(plan, rows, values.rows))
    return parts


def gradient_parts(plan: Plan, gradient: Gradient) -> list[tuple[int, memoryview]]:
    """Returns pairs of extent index and bytes for the arenas of a gradient, in plan order."""
    return [
        (index, part.view(np.uint8).data)
        for index, arena in enumerate(plan.arenas)
        for part in gradient[arena.name].parts
        if part.size
    ]


def gradient_extents(plan: Plan, gradient: Gradient) -> list[Extent]:
    """Returns the extents of a gradient, in plan order."""
    return [
        Extent(index, gradient[arena.name].nbytes, gradient[arena.name].encoding)
        for index, arena in enumerate(plan.arenas)
    ]


def to_encoding(encoding: Encoding) -> types.Encoding:
    """Converts the name of an encoding to its number in messages."""
    return _ENCODINGS[encoding]


def from_encoding(number: int) -> Encoding:
    """The inverse of :func:`to_encoding`; raises InvalidArgument for an unset or unknown number."""
    if number not in _ENCODING_BY_NUMBER:
        raise InvalidArgument(f"encoding {number} is unknown; expected 1 to {len(_ENCODINGS)}")
    return _ENCODING_BY_NUMBER[number]


def to_extents(extents: Iterable[Extent]) -> list[types.Extent]:
    """Encodes extents."""
    return [
        types.Extent(arena=arena, nbytes=nbytes, encoding=_ENCODINGS[encoding])
        for arena, nbytes, encoding in extents
    ]


def from_extents(extents: Iterable[types.Extent]) -> tuple[Extent, ...]:
    """Decodes extents."""
    return tuple(Extent(e.arena, e.nbytes, from_encoding(e.encoding)) for e in extents)


_ENCODINGS: dict[Encoding, types.Encoding] = {
    "plain": types.ENCODING_PLAIN,
    "bfloat16": types.ENCODING_BFLOAT16,
    "float16": types.ENCODING_FLOAT16,
    "int8": types.ENCODING_INT8,
    "topk": types.ENCODING_TOPK,
}

_ENCODING_BY_NUMBER: dict[int, Encoding] = {number: e for e, number in _ENCODINGS.items()}

Header = TypeVar("Header", bound=Message)
