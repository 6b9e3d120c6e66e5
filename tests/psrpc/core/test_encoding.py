"""How a part of an arena travels: what comes out is what went in, to the promised error."""

from __future__ import annotations

import re
import struct
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psrpc.core.encoding import (
    INT8_BLOCK,
    LARGEST,
    Encoding,
    NDArray,
    check_nbytes,
    decode,
    encode_int8,
    encode_topk,
    round_to,
    wire_dtype,
)
from psrpc.core.errors import InvalidArgument

LENGTHS = (0, 1, 2, 3, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, 3 * INT8_BLOCK + 77)

few = settings(max_examples=40, derandomize=True)

FINITE = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 1.2e-38, -1.0]),
)


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Of every length up to three blocks and something; blocks of different scales."""
    length = draw(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 3 * INT8_BLOCK + 77)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    array = rng.standard_normal(length).astype(np.float32)
    for start in range(0, length, INT8_BLOCK):
        array[start : start + INT8_BLOCK] *= np.float32(draw(FINITE))
    some = draw(st.lists(FINITE, max_size=min(length, 4)))
    array[: len(some)] = some
    return array


def decoded(encoding: Encoding, raw: NDArray, length: int) -> NDArray:
    into = np.full(length, np.nan, np.float32)
    decode(encoding, raw, into)
    return into


@few
@given(arrays())
def test_int8_is_off_by_half_a_scale_at_most(array: npt.NDArray[np.float32]) -> None:
    raw = encode_int8(array)
    assert not check_nbytes("int8", raw.nbytes, len(array), "float32")
    back = decoded("int8", raw, len(array))
    for start in range(0, len(array), INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        scale = np.abs(array[block]).max().astype(np.float64) / 127
        error = np.abs(back[block].astype(np.float64) - array[block]).max()
        # Division and product are rounded to float32: 127 of 2**-24. Subnormal scales are 0.
        tiny = 127 * float(np.finfo(np.float32).smallest_normal)
        assert error <= 0.50002 * scale or np.abs(array[block]).max() < tiny, start


def test_int8_bytes_are_those_of_the_contract() -> None:
    array = np.zeros(2 * INT8_BLOCK + 2, np.float32)
    array[0], array[1] = -254, 2
    array[-2], array[-1] = 127, -50.4
    raw = encode_int8(array).tobytes()
    assert struct.unpack_from("<3f", raw) == (2, 0, 1)
    elements = struct.unpack_from(f"<{len(array)}b", raw, 12)
    assert elements[:2] == (-127, 1)
    assert elements[-2:] == (127, -50)
    assert not any(elements[2:-2])
    assert len(raw) == 12 + len(array)


@few
@given(arrays(), st.data())
def test_topk_keeps_the_largest_as_they_are(
    array: npt.NDArray[np.float32], data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(array) // 2))
    raw = encode_topk(array, k)
    assert not check_nbytes("topk", raw.nbytes, len(array), "float32")
    back = decoded("topk", raw, len(array))
    indices = raw[: 4 * k].view("<u4")
    assert len(set(indices.tolist())) == k
    np.testing.assert_array_equal(back[indices], array[indices])
    others = np.ones(len(array), np.bool_)
    others[indices] = False
    assert not back[others].any()
    if k:
        assert np.abs(array[indices]).min() >= np.abs(array[others]).max()


def test_int8_of_many_blocks_is_that_of_each() -> None:
    array = np.arange(259 * INT8_BLOCK + 5, dtype=np.float32)
    blocks = [array[at : at + INT8_BLOCK] for at in range(0, len(array), INT8_BLOCK)]
    expected = [decoded("int8", encode_int8(block), len(block)) for block in blocks]
    found = decoded("int8", encode_int8(array), len(array))
    np.testing.assert_array_equal(found, np.concatenate(expected))


def test_the_largest_numbers_stay_finite() -> None:
    largest = np.full(3, np.finfo(np.float32).max)
    np.testing.assert_allclose(decoded("int8", encode_int8(largest), 3), largest, rtol=1e-6)


def test_a_block_too_small_for_a_scale_counts_as_zeros() -> None:
    """A subnormal scale has too few digits: the elements would not fit into int8."""
    array = np.full(3, 180 * np.finfo(np.float32).smallest_subnormal)
    raw = encode_int8(array)
    assert not raw.any()
    assert decoded("int8", raw, 3).tolist() == [0, 0, 0]


def test_topk_bytes_are_those_of_the_contract() -> None:
    raw = encode_topk(np.array([1, -4, 2, 3, 0, 0.5], np.float32), 3)
    assert struct.unpack("<3I3f", raw.tobytes()) == (1, 2, 3, -4, 2, 3)


@pytest.mark.parametrize("k", [-1, 4])
def test_topk_of_more_than_half_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}; expected 0 to 3"):
        encode_topk(np.ones(7, np.float32), k)


@few
@given(arrays(), st.sampled_from(["int8", "topk"]), st.data())
def test_every_truncation_is_refused(
    array: npt.NDArray[np.float32], encoding: Literal["int8", "topk"], data: st.DataObject
) -> None:
    raw = encode_int8(array) if encoding == "int8" else encode_topk(array, len(array) // 2)
    for cut in {data.draw(st.integers(1, max(1, len(raw)))), 1, 7}:
        short = raw[: max(0, len(raw) - cut)]
        if len(short) == len(raw) or (encoding == "topk" and len(short) % 8 == 0):
            continue  # A topk of fewer elements, its halves at other places.
        with pytest.raises(InvalidArgument, match=r"bytes of \d+ elements as"):
            decoded(encoding, short, len(array))
    longer = np.zeros(len(raw) + 8, np.uint8)
    with pytest.raises(InvalidArgument, match="elements as"):
        decoded(encoding, longer, len(array))


def topk(indices: Any, values: Any) -> NDArray:
    raw = np.array(indices, "<u4").tobytes() + np.array(values, "<f4").tobytes()
    return np.frombuffer(raw, np.uint8)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (topk([3, 3], [1, 2]), "index 3 comes after 3; expected rising ones"),
        (topk([0, 9, 5], [1, 2, 3]), "index 5 comes after 9"),
        (topk([0, 10], [1, 2]), "index 10 is beyond the 10 elements"),
        (topk([2**32 - 1], [1]), "index 4294967295 is beyond"),
        (topk([1, 7], [1, np.nan]), "element 7 is nan; expected finite ones"),
        (topk([1, 7], [-np.inf, 1]), "element 1 is -inf"),
        (topk(range(6), range(6)), "48 bytes of 10 elements as topk: expected a multiple of 8"),
        (np.zeros(7, np.uint8), "7 bytes of 10 elements as topk"),
    ],
)
def test_unsound_topk_is_refused(raw: NDArray, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decoded("topk", raw, 10)


@few
@given(
    st.lists(st.integers(0, 12), max_size=5),
    st.lists(st.floats(width=32), min_size=5, max_size=5),
)
def test_topk_is_taken_only_if_it_says_one_thing(indices: list[int], values: list[float]) -> None:
    values = values[: len(indices)]
    sound = (
        indices == sorted(set(indices))
        and all(i < 10 for i in indices)
        and bool(np.isfinite(values).all())
    )
    raw = topk(indices, values)
    if sound:
        expected = np.zeros(10, np.float32)
        expected[indices] = values
        np.testing.assert_array_equal(decoded("topk", raw, 10), expected)
    else:
        with pytest.raises(InvalidArgument):
            decoded("topk", raw, 10)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, 2.0**122])
@pytest.mark.parametrize("block", [0, 1])
def test_unsound_scales_are_refused(scale: float, block: int) -> None:
    raw = encode_int8(np.ones(INT8_BLOCK + 5, np.float32))
    raw[:8].view("<f4")[block] = scale
    with pytest.raises(InvalidArgument, match=re.escape(f"scale of block {block} is {scale};")):
        decoded("int8", raw, INT8_BLOCK + 5)


def test_decode_is_for_what_has_no_dtype_of_its_own() -> None:
    with pytest.raises(ValueError, match="read through a view of bfloat16"):
        decoded("bfloat16", np.zeros(6, np.uint8), 3)


@few
@given(
    hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_rounding_is_to_nearest_even_and_keeps_what_is_finite_finite(
    array: npt.NDArray[np.float32], encoding: Literal["bfloat16", "float16"]
) -> None:
    rounded = round_to(array, encoding)
    assert rounded.dtype == wire_dtype(encoding, "float32")
    wide = rounded.astype(np.float32)
    np.testing.assert_array_equal(np.isfinite(wide), np.isfinite(array))
    limit = LARGEST[encoding]
    inside = np.abs(array) <= limit
    np.testing.assert_array_equal(wide[inside], array[inside].astype(rounded.dtype))
    beyond = np.isfinite(array) & ~inside
    np.testing.assert_array_equal(wide[beyond], np.copysign(limit, array[beyond]))
    out = ~np.isfinite(array)
    np.testing.assert_array_equal(wide[out], array[out])


def test_ties_go_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    assert round_to(ties, "bfloat16").tolist() == [1, 1 + 2**-6, -1]
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11, 3.5e38 / 1e34], np.float32)
    assert round_to(ties, "float16").tolist() == [1, 1 + 2**-9, 35008]
    assert round_to(np.array([65504, 65519, 65520], np.float32), "float16").tolist() == [65504] * 3


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_a_run_that_diverged_still_shows(encoding: Literal["bfloat16", "float16"]) -> None:
    array = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32)
    limit = float(LARGEST[encoding])
    expected = [limit, -limit, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(round_to(array, encoding).astype(np.float32), expected)


def test_elements_and_their_dtypes() -> None:
    assert wire_dtype("plain", "float64") == np.float64
    assert wire_dtype("bfloat16", "float32") == np.dtype(ml_dtypes.bfloat16)
    assert wire_dtype("float16", "float32") == np.float16
    with pytest.raises(ValueError, match="int8 has no dtype of its elements"):
        wire_dtype("int8", "float32")
