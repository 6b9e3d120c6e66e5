"""Encodes a shard's part of an arena for the wire: plain, rounded, or compressed.

``Encoding`` in protos/psrpc/v1/types.proto describes the bytes.
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
"""Number of elements that share one scale. Load-bearing."""

LARGEST = {
    "bfloat16": np.float32((2 - 2**-7) * 2.0**127),
    "float16": np.float32((2 - 2**-10) * 2.0**15),
}
"""Largest finite number of each encoding. It replaces values that would round to infinity."""

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
    """One shard's part of an arena, encoded for sending.

    Attributes:
        parts: contiguous arrays, sent one after another, so that a gradient in several TensorFlow
            buffers need not be joined.
    """

    encoding: Encoding
    parts: tuple[NDArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(part.nbytes for part in self.parts)


Gradient = Mapping[str, Encoded]
"""One shard's part of a gradient, by arena name, for every arena of the plan."""


def plain(array: NDArray) -> Encoded:
    """Wraps ``array``, a shard's contiguous part of an arena, without encoding it."""
    return Encoded("plain", (array,))


def check_nbytes(encoding: Encoding, nbytes: int, length: int, dtype: str) -> str:
    """Returns an empty string if ``nbytes`` is the size of ``length`` elements in this encoding;
    otherwise a text that says the expected size."""
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
    """Returns the wire dtype of elements of ``dtype`` as ``plain``, ``bfloat16`` or ``float16``.

    Raises:
        ValueError: ``int8`` and ``topk`` have no dtype of single elements.
    """
    if encoding == "plain":
        return np.dtype(dtype)
    if encoding not in _HALVES:
        raise ValueError(f"{encoding} has no dtype of its elements; decode it")
    return _HALVES[encoding]


def wire_encoding(dtype: str) -> Encoding:
    """Returns the encoding of parameters and uncompressed gradients in a job with
    ``wire_dtype=dtype``.

    Raises:
        InvalidArgument: ``dtype`` is not a possible value.
    """
    if dtype not in _BY_WIRE_DTYPE:
        raise InvalidArgument(f"wire_dtype is {dtype!r}; expected {' or '.join(_BY_WIRE_DTYPE)}")
    return _BY_WIRE_DTYPE[dtype]


def round_to(array: NDArray, encoding: Encoding) -> NDArray:
    """Rounds a float32 ``array`` to ``bfloat16`` or ``float16``, to nearest even.

    Finite elements stay finite: elements out of range become the largest finite number of their
    sign. Infinities and NaN are kept.
    """
    dtype, largest = _HALVES[encoding], LARGEST[encoding]
    # NaN fails the comparison, too. Comparing minimum and maximum takes a third of the time of
    # checking every element.
    if not -largest <= array.min(initial=0) <= array.max(initial=0) <= largest:
        array = np.where(np.isinf(array), array, np.clip(array, -largest, largest))
    return array.astype(dtype)


def encode_int8(array: npt.NDArray[np.float32]) -> Bytes:
    """Encodes ``array``, ``[n]`` finite float32, as ``int8``.

    The scale of a block is its largest magnitude / 127, so the error of an element is at most half
    the scale. A block whose scale would be subnormal becomes zeros.
    """
    raw = np.empty(4 * _blocks(len(array)) + len(array), np.uint8)
    scales, levels = _int8_parts(raw, len(array))
    for block, rows in _blockwise(len(array)):
        values = array[block].reshape(len(scales[rows]), -1)
        scale = np.maximum(values.max(axis=1), -values.min(axis=1)) / _LEVELS
        scale[scale < _SMALLEST_NORMAL] = 0
        # Limits the scale, so that 127 times the scale is finite.
        np.minimum(scale, _LARGEST_SCALE, out=scale, where=np.isfinite(scale))
        scales[rows] = scale
        scale[scale == 0] = np.inf
        steps = values / scale[:, np.newaxis]
        levels[block] = np.rint(steps, out=steps).reshape(-1)
    return raw


def encode_topk(array: npt.NDArray[np.float32], k: int) -> Bytes:
    """Encodes the ``k`` elements of largest magnitude of ``array``, ``[n]`` finite float32, as
    ``topk``.

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
    """Decodes ``raw``, ``int8`` or ``topk``, into ``into``, ``[n]`` contiguous.

    Raises:
        InvalidArgument: ``raw`` is not an encoding of n elements. The contents of ``into`` are then
            undefined.
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
    # The upper limit keeps 127 times a scale finite. NaN fails both comparisons.
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
    """Returns views of the scales, ``[blocks]`` float32, and elements, ``[length]`` int8."""
    start = 4 * _blocks(length)
    return raw[:start].view("<f4"), raw[start:].view(np.int8)


def _blockwise(length: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of elements and of their scales: first the full blocks, as many at a time as
    fit the cache, then a partial last block."""
    full = length // INT8_BLOCK
    for start in range(0, full, _ROWS):
        stop = min(start + _ROWS, full)
        yield slice(start * INT8_BLOCK, stop * INT8_BLOCK), slice(start, stop)
    if length % INT8_BLOCK:
        yield slice(full * INT8_BLOCK, length), slice(full, full + 1)
