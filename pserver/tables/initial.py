"""Computes the initial values of rows. They depend on seed, table, id and column alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pserver.tables.memory import scatter
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import Hashes, Ids, TableSpec, mix

_BLOCK = 1 << 13
"""Number of pairs of elements computed at a time, so that intermediate arrays stay in the cache."""

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_2_32 = float(2**32)

# The single-precision polynomials of Giles 2010, "Approximating the erfinv function", table 5,
# times the square root of 2, highest power first; evaluated in double precision here.
_ROOT_2 = float(np.sqrt(2.0))
_MIDDLE = tuple(
    _ROOT_2 * c
    for c in (
        2.81022636e-08,
        3.43273939e-07,
        -3.5233877e-06,
        -4.39150654e-06,
        0.00021858087,
        -0.00125372503,
        -0.00417768164,
        0.246640727,
        1.50140941,
    )
)
_TAIL = tuple(
    _ROOT_2 * c
    for c in (
        -0.000200214257,
        0.000100950558,
        0.00134934322,
        -0.00367342844,
        0.00573950773,
        -0.0076224613,
        0.00943887047,
        1.00167406,
        2.83297682,
    )
)

_Uniform = npt.NDArray[np.float64]
_Fill = Callable[[npt.NDArray[np.uint32], npt.NDArray[np.float32]], None]


class InitialRows:
    """The values of one table's rows before their first update.

    All random bits come from :func:`psrpc.core.tables.mix` of a key (made of seed and table name),
    the id, and the number of a pair of columns. All further operations are ones that IEEE 754
    rounds correctly. So the values are the same bit by bit in any order and batch, on any shard and
    machine. Not thread-safe."""

    def __init__(self, spec: TableSpec) -> None:
        name, config = spec.initializer["class_name"], spec.initializer["config"]
        self._width = spec.width
        self._pairs = -(-spec.width // 2)
        self._rows = max(1, _BLOCK // self._pairs)
        digest = hashlib.sha256(f"{spec.seed}:{spec.name}".encode()).digest()
        self._key = np.uint64(int.from_bytes(digest[:8], "little"))
        with np.errstate(over="ignore"):
            self._columns = np.arange(1, self._pairs + 1, dtype=np.uint64) * _STRIDE
        self._constant: np.float32 | None = None
        self._fill: _Fill
        try:
            if name == "constant":
                self._constant = np.float32(config["value"])
            elif name == "uniform":
                self._fill = _uniform(float(config["low"]), float(config["high"]))
            else:
                self._fill = _normal(float(config["mean"]), float(config["stddev"]))
        except KeyError as error:
            raise InvalidJob(
                f"table {spec.name!r} has initializer {name} without {error.args[0]}"
            ) from None

    def fill(self, ids: Ids, into: npt.NDArray[np.float32]) -> None:
        """Writes the initial rows of ``ids`` to ``into``, ``[n, width]``."""
        if self._constant is not None:
            into[...] = self._constant
            return
        for start in range(0, len(ids), self._rows):
            block = ids[start : start + self._rows]
            self._fill(self._bits(block), into[start : start + self._rows])

    def fill_to(self, ids: Ids, at: npt.NDArray[np.int64], into: npt.NDArray[np.float32]) -> None:
        """Writes the initial rows of ``ids`` to ``into[at]``; ``at`` are distinct."""
        if self._constant is not None:
            into[at] = self._constant
            return
        rows = np.empty((min(self._rows, len(at)), self._width), np.float32)
        for start in range(0, len(at), self._rows):
            block = slice(start, min(start + self._rows, len(at)))
            own = rows[: block.stop - start]
            self._fill(self._bits(ids[block]), own)
            scatter(into, at[block], own)

    def _bits(self, ids: Ids) -> npt.NDArray[np.uint32]:
        """Returns 32 random bits for each element, ``[n, width]``."""
        keys: Hashes = mix(ids.view(np.uint64) ^ self._key)
        pairs = mix(keys[:, None] + self._columns).astype("<u8", copy=False)
        return pairs.view("<u4")[:, : self._width]


def _uniform(low: float, high: float) -> _Fill:
    # Uses 24 bits, because float32 represents those exactly. Rounding may make the product `high`
    # itself.
    first, scale = np.float32(low), np.float32((high - low) / 2**24)

    def fill(bits: npt.NDArray[np.uint32], into: npt.NDArray[np.float32]) -> None:
        np.right_shift(bits, np.uint32(8), out=into, casting="unsafe")
        into *= scale
        into += first

    return fill


def _normal(mean: float, stddev: float) -> _Fill:
    def fill(bits: npt.NDArray[np.uint32], into: npt.NDArray[np.float32]) -> None:
        standard = _standard_normal(bits)
        standard *= stddev
        standard += mean
        into[...] = standard

    return fill


def _standard_normal(bits: npt.NDArray[np.uint32]) -> _Uniform:
    """Computes √2 erfinv(2u − 1) with u = (bits + ½) / 2³². The results lie within ±6.4."""
    u = bits.astype(np.float64)
    u += 0.5
    u /= _2_32
    x = 2.0 * u
    x -= 1.0
    # u becomes (1 − x)(1 + x), computed without cancellation.
    u *= 4.0 * (1.0 - u)
    w = _log(u)
    np.negative(w, out=w)
    factor = _polynomial(_MIDDLE, w - 2.5)
    far = np.nonzero(w >= 5.0)
    factor[far] = _polynomial(_TAIL, np.sqrt(w[far]) - 3.0)
    factor *= x
    return factor


def _polynomial(coefficients: tuple[float, ...], x: _Uniform) -> _Uniform:
    total = coefficients[0] * x
    for c in coefficients[1:-1]:
        total += c
        total *= x
    total += coefficients[-1]
    return total


_ATANH: tuple[float, ...] = tuple(2.0 / n for n in range(21, 0, -2))
_LOG_2 = 0.6931471805599453


def _log(x: _Uniform) -> _Uniform:
    """Computes the natural logarithm to about 1e-15, by ln m = 2 artanh((m − 1) / (m + 1)). Uses
    only correctly rounded operations, because ``np.log`` may differ between machines in the last
    bit."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa[small] *= 2.0
    exponent -= small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    total = _polynomial(_ATANH, s * s)
    total *= s
    total += exponent * _LOG_2
    return total
