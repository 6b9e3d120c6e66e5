"""How a shard's part of an arena travels: as it is, rounded, or compressed.

See ``Encoding`` in protos/psrpc/v1/types.proto for the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidArgument

NDArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

Encoding = Literal["plain", "bfloat16", "float16", "int8", "topk"]

INT8_BLOCK = 1024
"""Elements that share one scale. Load-bearing."""

LARGEST = {
    "bfloat16": np.float32((2 - 2**-7) * 2.0**127),
    "float16": np.float32((2 - 2**-10) * 2.0**15),
}
"""The largest finite number of each; values that would round to infinity become it."""

_HALVES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_BY_WIRE_DTYPE: dict[str, Encoding] = {
    "float32": "plain",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
_LEVELS = np.float32(127)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0))
_ROWS = 256


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
        "int8": length + 4 * _blocks(length),
    }
    if encoding == "topk":
        fits = nbytes % 8 == 0 and nbytes <= length * 4
        return "" if fits else f"expected a multiple of 8, at most {length * 4}"
    return "" if nbytes == expected[encoding] else f"expected {expected[encoding]}"


def wire_dtype(encoding: Encoding, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """What an element of ``dtype`` is while it travels as ``plain``, ``bfloat16`` or ``float16``.

    Raises:
        ValueError: ``int8`` and ``topk`` do not travel element by element.
    """
    if encoding == "plain":
        return np.dtype(dtype)
    if encoding not in _HALVES:
        raise ValueError(f"{encoding} has no dtype of its elements; decode it")
    return _HALVES[encoding]


def wire_encoding(dtype: str) -> Encoding:
    """How parameters, and gradients that are not compressed, travel in a job whose ``wire_dtype``
    is ``dtype``.

    Raises:
        InvalidArgument: there is no such choice.
    """
    if dtype not in _BY_WIRE_DTYPE:
        raise InvalidArgument(f"wire_dtype is {dtype!r}; expected {' or '.join(_BY_WIRE_DTYPE)}")
    return _BY_WIRE_DTYPE[dtype]


def round_to(array: NDArray, encoding: Encoding) -> NDArray:
    """A float32 ``array`` rounded to ``bfloat16`` or ``float16``, to nearest even.

    Finite elements stay finite: those out of range become the largest finite number of their
    sign. Infinities and NaN stay what they are.
    """
    dtype, largest = _HALVES[encoding], LARGEST[encoding]
    # NaN fails the comparison too. This costs a third of what looking at every element does.
    if not -largest <= array.min(initial=0) <= array.max(initial=0) <= largest:
        array = np.where(np.isinf(array), array, np.clip(array, -largest, largest))
    return array.astype(dtype)


def encode_int8(array: npt.NDArray[np.float32]) -> Bytes:
    """``array``, ``[n]`` finite float32, as ``int8`` bytes.

    The scale of a block is its largest magnitude / 127, so an element is off by half a scale at
    most. A block whose scale would be subnormal counts as zeros.
    """
    raw = np.empty(4 * _blocks(len(array)) + len(array), np.uint8)
    scales, levels = _int8_parts(raw, len(array))
    for block, rows in _blockwise(len(array)):
        values = array[block].reshape(len(scales[rows]), -1)
        scale = np.maximum(values.max(axis=1), -values.min(axis=1)) / _LEVELS
        scale[scale < _SMALLEST_NORMAL] = 0
        # So that 127 times the scale is finite as well.
        np.minimum(scale, _LARGEST_SCALE, out=scale, where=np.isfinite(scale))
        scales[rows] = scale
        scale[scale == 0] = np.inf
        steps = values / scale[:, np.newaxis]
        levels[block] = np.rint(steps, out=steps).reshape(-1)
    return raw


def encode_topk(array: npt.NDArray[np.float32], k: int) -> Bytes:
    """The ``k`` elements of largest magnitude of ``array``, ``[n]`` finite float32, as ``topk``
    bytes.

    Raises:
        ValueError: ``k`` is negative or more than half of n.
    """
    if not 0 <= k <= len(array) // 2:
        raise ValueError(f"k is {k}; expected 0 to {len(array) // 2}, half of the elements")
    raw = np.empty(8 * k, np.uint8)
    if k:
        rest = len(array) - k
        indices = np.sort(np.argpartition(np.abs(array), rest)[rest:])
        raw[: 4 * k].view("<u4")[:] = indices
        raw[4 * k :].view("<f4")[:] = array[indices]
    return raw


def decode(encoding: Encoding, raw: Bytes, into: npt.NDArray[np.float32]) -> None:
    """Puts what ``raw`` stands for into ``into``, ``[n]`` contiguous: ``int8`` or ``topk``.

    Raises:
        InvalidArgument: ``raw`` is not such an encoding of n elements. ``into`` is then garbage.
    """
    wrong = check_nbytes(encoding, len(raw), len(into), "float32")
    if wrong:
        raise InvalidArgument(f"{len(raw)} bytes of {len(into)} elements as {encoding}: {wrong}")
    if encoding == "int8":
        _decode_int8(raw, into)
    elif encoding == "topk":
        _decode_topk(raw, into)
    else:
        raise ValueError(f"{encoding} is read through a view of {wire_dtype(encoding, 'float32')}")


def _decode_int8(raw: Bytes, into: npt.NDArray[np.float32]) -> None:
    scales, levels = _int8_parts(raw, len(into))
    # So that 127 times a scale is finite, too; NaN fails both comparisons.
    sound = (scales >= 0) & (scales <= _LARGEST_SCALE)
    if not sound.all():
        first = int(np.argmin(sound))
        raise InvalidArgument(
            f"int8: the scale of block {first} is {scales[first]}; expected 0 to {_LARGEST_SCALE}"
        )
    for block, rows in _blockwise(len(into)):
        scale = scales[rows][:, np.newaxis]
        shape = (len(scale), -1)
        np.multiply(levels[block].reshape(shape), scale, out=into[block].reshape(shape))


def _decode_topk(raw: Bytes, into: npt.NDArray[np.float32]) -> None:
    half = len(raw) // 2
    indices, values = raw[:half].view("<u4"), raw[half:].view("<f4")
    rising = indices[1:] > indices[:-1]
    if not rising.all():
        first = int(np.argmin(rising))
        raise InvalidArgument(
            f"topk: index {indices[first + 1]} comes after {indices[first]}; expected rising ones"
        )
    if len(indices) and indices[-1] >= len(into):
        raise InvalidArgument(f"topk: index {indices[-1]} is beyond the {len(into)} elements")
    finite = np.isfinite(values)
    if not finite.all():
        first = int(np.argmin(finite))
        raise InvalidArgument(
            f"topk: element {indices[first]} is {values[first]}; expected finite ones"
        )
    into.fill(0)
    into[indices] = values


def _blocks(length: int) -> int:
    return -(-length // INT8_BLOCK)


def _int8_parts(raw: Bytes, length: int) -> tuple[NDArray, NDArray]:
    """Views of the scales, ``[blocks]`` float32, and of the elements, ``[length]`` int8."""
    start = 4 * _blocks(length)
    return raw[:start].view("<f4"), raw[start:].view(np.int8)


def _blockwise(length: int) -> Iterator[tuple[slice, slice]]:
    """The full blocks, as many at a time as a cache holds, then the last one if it is not full:
    their elements and their scales."""
    full = length // INT8_BLOCK
    for start in range(0, full, _ROWS):
        stop = min(start + _ROWS, full)
        yield slice(start * INT8_BLOCK, stop * INT8_BLOCK), slice(start, stop)
    if length % INT8_BLOCK:
        yield slice(full * INT8_BLOCK, length), slice(full, full + 1)
