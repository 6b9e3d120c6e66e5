"""Revocations: work is free only when every shard refuses who had it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership.fencing import FencingOrders
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Revocation

ATTEMPT = Attempt(BatchId(0, 0, 4), 1)


def test_work_is_free_when_all_shards_have_obeyed() -> None:
    revocations = FencingOrders(2)
    assert revocations.add("w0", [ATTEMPT]) == Revocation(1, "w0", (ATTEMPT,))
    assert revocations.add("w1", []).number == 2
    assert revocations.waiting_for() == "shards 0, 1 to refuse w0; shards 0, 1 to refuse w1"
    assert revocations.obeyed(0, 2) == []
    assert revocations.waiting_for() == "shard 1 to refuse w0; shard 1 to refuse w1"
    assert revocations.obeyed(1, 1) == ["w0"]
    assert revocations.obeyed(1, 1) == []
    assert revocations.obeyed(0, 1) == []  # an old word, late
    assert revocations.obeyed(1, 2) == ["w1"]
    assert revocations.waiting_for() == ""


def test_fences_that_a_shard_has_not_obeyed_are_repeated() -> None:
    revocations = FencingOrders(2)
    one, two = revocations.add("w0", []), revocations.add("w1", [])
    revocations.obeyed(0, 1)
    assert revocations.missed(0) == [two]
    assert revocations.missed(1) == [one, two]


def test_an_acknowledgement_of_an_unknown_number_frees_no_worker() -> None:
    revocations = FencingOrders(1)
    assert revocations.obeyed(0, 5) == []
    revocations.add("w0", [])
    assert revocations.missed(0) != []
    assert revocations.obeyed(0, 1) == ["w0"]


def test_a_new_generation_counts_anew() -> None:
    revocations = FencingOrders(1)
    revocations.add("w0", [])
    revocations.begin()
    assert revocations.missed(0) == []
    assert revocations.add("w1", []).number == 1
    assert revocations.obeyed(0, 1) == ["w1"]


@given(seed=st.integers(0, 10**6))
def test_in_any_order_each_is_freed_once_and_not_before_all_have_obeyed(seed: int) -> None:
    chance = random.Random(seed)
    revocations, said, added, freed = FencingOrders(3), [0, 0, 0], 0, []
    for _ in range(60):
        if chance.random() < 0.3:
            added += 1
            revocations.add(str(added), [])
        else:
            shard = chance.randrange(3)
            said[shard] = max(said[shard], chance.randint(0, added))
            freed += revocations.obeyed(shard, chance.choice([said[shard], 0]))
            assert all(int(worker) <= min(said) for worker in freed)
    for shard in range(3):
        freed += revocations.obeyed(shard, added)
    assert freed == [str(number) for number in range(1, added + 1)]
