"""A gradient with a NaN or an infinity is refused whole, wherever it is and however it travels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pserver.core import assembly
from pserver.core.assembly import is_finite
from psrpc.core.encoding import Encoded, Encoding, round_to
from psrpc.core.errors import InvalidArgument
from tests.pserver.exchanges import BATCH, NAME, PLAN, STATE, normal
from tests.pserver.shards import (
    AUTHORITY,
    Transport,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    served,
    whole,
)

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]
BAD = [np.nan, -np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_anywhere(dtype: Any, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "LOOK", 7)
    good = np.linspace(-2, 2, 30).astype(dtype)
    assert is_finite(good)
    for place in range(30):
        wrong = good.copy()
        wrong[place] = bad
        assert not is_finite(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_are_finite(dtype: Any) -> None:
    """The sum of their squares is not."""
    info: Any = ml_dtypes.finfo
    assert is_finite(np.full(99, info(dtype).max, dtype))
    assert is_finite(np.full(0, 1.0, dtype))


def test_integers_and_bytes_are_finite() -> None:
    assert is_finite(np.full(9, np.iinfo(np.int64).max))
    assert is_finite(np.full(9, 255, np.uint8))


def pushed(arena: str, place: int, bad: float, encoding: Encoding) -> dict[str, Encoded]:
    arrays = normal()
    arrays[arena][place] = bad
    gradient = dict(part(PLAN, arrays))
    if encoding != "plain":
        with np.errstate(invalid="ignore"):
            rounded = round_to(arrays[NAME], encoding)
        gradient[NAME] = Encoded(encoding, (rounded,))
    return gradient


@pytest.mark.parametrize("replicas", [0, 2], ids=["async", "sync"])
@pytest.mark.parametrize("transport", ["calls", "data connection"])
@pytest.mark.parametrize(
    ("arena", "encoding"),
    [(NAME, "plain"), (NAME, "bfloat16"), (NAME, "float16"), (STATE, "plain")],
)
def test_a_push_with_one_is_refused_by_name_and_changes_nothing(
    transport: Transport, arena: str, encoding: Encoding, replicas: int
) -> None:
    with served(engine_of(PLAN, replicas=replicas), transport=transport) as client:
        fence = fence_of(client, worker="w1")
        grant = AUTHORITY.grant_initialize("w1", 1)
        client.initialize(fence, counting(PLAN), grant)
        for bad in (np.nan, -np.inf):
            for place in (0, -1):
                gradient = pushed(arena, place, bad, encoding)
                with pytest.raises(
                    InvalidArgument, match=rf"arena {arena} of the push of .* by w1"
                ):
                    client.push(fence, leased("w1", BATCH, 1, 0, gradient))
        into = whole(PLAN)
        client.pull(fence, None, into)
        np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME])
        # The batch is not applied yet: a worker that computes it rightly may push it.
        other = fence_of(client, worker="w2")
        outcome = client.push(other, leased("w2", BATCH, 2, 0, part(PLAN, normal()))).outcome
        assert outcome == ("staged" if replicas else "applied")
        assert client.get_status().refused == 4
