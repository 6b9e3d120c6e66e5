"""How a shard's part of an arena travels: as it is, rounded, or compressed.

See ``Encoding`` in protos/psrpc/v1/types.proto for the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

NDArray = npt.NDArray[Any]

Encoding = Literal["plain", "bfloat16", "float16", "int8", "topk"]

INT8_BLOCK = 1024
"""Elements that share one scale. Load-bearing."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One shard's part of an arena on its way to the shard.

    Attributes:
        parts: contiguous arrays; their bytes one after another are what travels. A gradient that
            TensorFlow left in several buffers needs no joining.
    """

    encoding: Encoding
    parts: tuple[NDArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(part.nbytes for part in self.parts)


Gradient = Mapping[str, Encoded]
"""What one shard gets of a gradient: arena name -> its part, every arena of the plan."""


def plain(array: NDArray) -> Encoded:
    """``array``, a shard's contiguous part of an arena, as it is."""
    return Encoded("plain", (array,))


def check_nbytes(encoding: Encoding, nbytes: int, length: int, dtype: str) -> str:
    """Why ``nbytes`` cannot be a part of ``length`` elements of ``dtype``; empty if they can."""
    itemsize = np.dtype(dtype).itemsize
    expected = {
        "plain": length * itemsize,
        "bfloat16": length * 2,
        "float16": length * 2,
        "int8": length + 4 * -(-length // INT8_BLOCK),
    }
    if encoding == "topk":
        fits = nbytes % 8 == 0 and 0 <= nbytes <= length * 4
        return "" if fits else f"expected a multiple of 8, at most {length * 4}"
    return "" if nbytes == expected[encoding] else f"expected {expected[encoding]}"
