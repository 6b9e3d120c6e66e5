"""Clicks without Criteo's data: records of the same shape whose probabilities are known.

Every record depends on (seed, its number) alone, so any part can be made anywhere, and no file is
needed. The logit of a click is a sum of

- an effect of each category, which depends on (seed, field, value) alone,
- products of two categories' hidden vectors, for the pairs of the fields with few categories, and
- an effect of the logarithm of each count.

Categories are drawn by Zipf's law: rank r has a probability of about 1 / r. Eleven fields have
2^30 ranks, so most of what they show is rare or new. The effect of a rank falls with
``1 / (1 + r / HEAD)``: frequent categories carry the signal, and one that was seen once has
nothing more to teach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrpc.core.tables import Hashes, mix

from .records import CATEGORICAL, MISSING, NUMERIC, Records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FEW = (3, 4, 8, 10, 16, 24)
SOME = (50, 100, 200, 400, 1000, 2000, 5000, 10_000, 100_000)
RANKS = np.array([*FEW, *SOME] + [1 << 30] * (CATEGORICAL - len(FEW) - len(SOME)), np.float64)
"""Categories of each field."""

HEAD = 100.0
EFFECT = 0.33
"""Standard deviation of the effect of the most frequent categories of a field."""

HIDDEN, PRODUCT = 4, 0.12
"""Elements of a hidden vector, and the standard deviation of a product of two."""

COUNT_EFFECT = 0.12
BIAS = -1.5
"""About a quarter are clicks, as in Criteo's sample."""

NUMERIC_MISSING, CATEGORICAL_MISSING = 0.1, 0.03

_COLUMNS = 64
"""Draws of one record: more than are needed, and a power of two."""

_DRAW, _CATEGORY, _VECTOR, _COUNT = (n << 56 for n in range(1, 5))
_LOW = np.uint64(0x7FF)
_SPREAD = 0x9E3779B1  # odd, so that no two ranks become one value


@dataclass(frozen=True)
class Truth:
    """All records of one seed."""

    seed: int

    def records(self, start: int, stop: int) -> tuple[Records, Floats]:
        """Records ``[start, stop)``, and the probability of a click of each, ``[n]``."""
        first = np.arange(start, stop, dtype=np.int64)[:, np.newaxis] * _COLUMNS
        hashes = self._hashes(_DRAW, first + np.arange(1 + NUMERIC + CATEGORICAL))
        label, count, rank = np.split(_uniform(hashes), [1, 1 + NUMERIC], axis=1)
        # Which fields are empty is in the bits that are too low to matter in a uniform number.
        empty = (hashes & _LOW) / (float(_LOW) + 1)
        numeric = np.minimum(np.floor(count**-1.2), 1e6) - 1
        numeric[empty[:, 1 : 1 + NUMERIC] < NUMERIC_MISSING] = np.nan
        ranks = np.exp(rank * np.log(RANKS + 1)).astype(np.int64) - 1
        ranks[empty[:, 1 + NUMERIC :] < CATEGORICAL_MISSING] = MISSING
        probability = 1 / (1 + np.exp(-self._logits(numeric, ranks)))
        records = Records(
            labels=(label[:, 0] < probability).astype(np.int8),
            numeric=numeric.astype(np.float32),
            categorical=_values(ranks),
        )
        return records, probability

    def _logits(self, numeric: Floats, ranks: Ints) -> Floats:
        """``[n]``."""
        fields = np.arange(CATEGORICAL) << 40
        head = np.maximum(ranks, 0)
        effects = EFFECT * self._centered(_CATEGORY, fields + ranks) / (1 + head / HEAD)
        # Products of all pairs at once (Rendle 2010, "Factorization Machines", lemma 3.1).
        few = (fields + ranks)[:, : len(FEW), np.newaxis] * HIDDEN + np.arange(HIDDEN)
        vectors = np.sqrt(PRODUCT) * HIDDEN**-0.25 * self._centered(_VECTOR, few)
        products = np.square(vectors.sum(axis=1)) - np.square(vectors).sum(axis=1)
        counts = np.log1p(np.nan_to_num(numeric)) - 1
        slopes = COUNT_EFFECT * self._centered(_COUNT, np.arange(NUMERIC))
        # Sums, not a matrix product, whose last bits depend on how many records there are.
        linear = effects.sum(axis=1) + (counts * slopes).sum(axis=1)
        logits: Floats = BIAS + linear + products.sum(axis=1) / 2
        return logits

    def _centered(self, kind: int, keys: Ints) -> Floats:
        """Of mean 0 and variance 1, uniform, in the shape of ``keys``."""
        return math.sqrt(12) * (_uniform(self._hashes(kind, keys)) - 0.5)

    def _hashes(self, kind: int, keys: Ints) -> Hashes:
        return mix((keys + kind) ^ self._salt)

    @cached_property
    def _salt(self) -> Ints:
        return mix(np.array([self.seed])).view(np.int64)


def _uniform(hashes: Hashes) -> Floats:
    """Above 0 and at most 1: the upper 53 bits."""
    return ((hashes >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


def _values(ranks: Ints) -> Ints:
    """Ranks as numbers of 32 bits, scattered and different; MISSING stays what it is."""
    offsets = mix(np.arange(CATEGORICAL)) >> np.uint64(32)
    spread = (ranks * _SPREAD + offsets.astype(np.int64)) & 0xFFFFFFFF
    return np.where(ranks == MISSING, MISSING, spread)


def auc(scores: Floats, labels: npt.NDArray[np.int8]) -> float:
    """Area under the ROC curve: how often a click has the higher score of a random pair of a click
    and none; ties count one half (Hanley and McNeil 1982)."""
    _, inverse, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[inverse]
    clicks = int(labels.sum())
    others = len(labels) - clicks
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))
