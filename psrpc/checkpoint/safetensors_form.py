"""The form of a safetensors file: eight bytes of length, a header in JSON, and tensors end to end.
Pure.

The header names the tensors in the order of their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from psrpc.core.document import (
    LARGEST,
    anything,
    check_extent,
    choice,
    listed,
    mapped,
    parse_json,
    record,
    whole,
    wrong,
)
from psrpc.core.errors import CheckpointError
from psrpc.core.tensor_form import shape

METADATA_KEY = "psrpc"
"""Key of this project's metadata, which is JSON. Load-bearing."""

DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint64": "U64",
    "uint32": "U32",
    "bool": "BOOL",
}
"""numpy dtypes and their names in safetensors."""

_DTYPE_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}


_HEADER = record({"__metadata__": record({METADATA_KEY: anything}, more=True)}, more=True)
_TENSORS = mapped(
    record({"dtype": choice(*_DTYPE_NAMES), "shape": shape, "data_offsets": listed(whole(), 2, 2)})
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and the offset of its bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * np.dtype(self.dtype).itemsize


def header_bytes(metadata: Mapping[str, Any], tensors: Iterable[Placed]) -> bytes:
    """Encodes the header of a file; the bytes of ``tensors`` follow in this order. Ignores their
    ``start``.

    Raises:
        CheckpointError: the header is too large to be read again.
    """
    document: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(metadata)}}
    at = 0
    for tensor in tensors:
        assert tensor.name not in document, tensor.name
        document[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        check_extent(text)
    except ValueError as error:
        raise CheckpointError(f"the header could not be read again: {error}") from None
    return len(text).to_bytes(8, "little") + text


def header_length(start: bytes | bytearray, nbytes: int) -> int:
    """Returns the size of the header from ``start``, the first eight bytes of a file of
    ``nbytes``. Raises ValueError if it exceeds the file."""
    length = int.from_bytes(start, "little")
    if not 8 + length <= nbytes or length > LARGEST:
        raise ValueError(f"its header is said to have {length} bytes")
    return length


def parse_safetensors_header(data: bytes, nbytes: int) -> tuple[Any, list[Placed]]:
    """Parses the header ``data``; returns the metadata, unchecked, and the tensors by offset.
    ``nbytes`` is the size of the bytes after the header.

    Raises:
        ValueError: the header is not valid, or does not fit ``nbytes``.
    """
    document = _HEADER(parse_json(data), "its header")
    metadata = document.pop("__metadata__")[METADATA_KEY]
    if not isinstance(metadata, str):
        raise wrong(metadata, METADATA_KEY, "text")
    _TENSORS(document, "")
    found = []
    end = 0
    for name, tensor in sorted(document.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        placed = Placed(name, _DTYPE_NAMES[tensor["dtype"]], tuple(tensor["shape"]), start)
        if start != end or stop - start != placed.nbytes:
            raise ValueError(f"tensor {name!r} does not lie where it can")
        found.append(placed)
        end = stop
    if end != nbytes:
        raise ValueError(f"its tensors have {end} bytes, and it holds {nbytes}")
    return parse_json(metadata.encode()), found
