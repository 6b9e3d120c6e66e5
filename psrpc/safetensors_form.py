"""The form of a safetensors file: eight bytes of length, a header in JSON, and tensors end to end.

Pure. Who writes a file names its tensors in the order in which their bytes follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

METADATA_KEY = "psrpc"
"""Where our own metadata stands, as JSON. Load-bearing."""

DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint64": "U64",
    "uint32": "U32",
    "bool": "BOOL",
}
"""numpy's names and safetensors'."""

_DTYPE_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and where its bytes begin, counted from the end of the header."""

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
    """What a file begins with; the bytes of ``tensors`` follow in this order. Their ``start`` is
    not looked at."""
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
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, nbytes: int) -> tuple[dict[str, Any], list[Placed]]:
    """The metadata, and the tensors by their place. ``text`` is the JSON, ``nbytes`` the size of
    what follows it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, RecursionError: it is not such a file.
    """
    document = json.loads(text)
    metadata = json.loads(document.pop("__metadata__")[METADATA_KEY])
    found = []
    end = 0
    for name, tensor in sorted(document.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        placed = Placed(
            name, _DTYPE_NAMES[tensor["dtype"]], tuple(map(int, tensor["shape"])), start
        )
        if start != end or stop - start != placed.nbytes or min(placed.shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} does not lie where it can")
        found.append(placed)
        end = stop
    if end != nbytes:
        raise ValueError(f"its tensors have {end} bytes, and it holds {nbytes}")
    return metadata, found
