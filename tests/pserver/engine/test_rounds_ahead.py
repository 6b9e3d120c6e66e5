"""A shard and rounds that are decided ahead: when it applies them, and when it forgets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pserver.core.assembly import shard_extents
from pserver.core.requests import InitializeRequest, PullRequest, StagedEverywhere
from pserver.engine.engine import ShardEngine
from pserver.engine.parameters import Parameters, ShardPosition
from pserver.engine.rounds import MOST_AHEAD
from pserver.transport.shard_memory import Shared
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, Decision, Revocation, RoundsAhead
from psrpc.core.errors import (
    AccessDenied,
    InvalidArgument,
    NotReady,
    ResourceExhausted,
    RoundPassed,
    StaleGeneration,
)
from psrpc.core.plan import aligned_empty
from psrpc.core.policy import Policy
from psrpc.security.signatures import receipt_of
from tests.pserver.bare_engine import (
    ROUNDS,
    A,
    B,
    C,
    D,
    a_push,
    decision,
    push,
    shard_of,
    value,
)
from tests.pserver.shards import AUTHORITY, engine_of, plan_of, session_of

FIRST, SECOND = decision((A, 1), (B, 2)), decision((C, 3), (D, 4), number=1)
TWO = plan_of(shards=2, size=8, state=False)
"""The plan of a shard that is one of two."""


def ahead(*decisions: Decision) -> RoundsAhead:
    return RoundsAhead(decisions)


def version(engine: ShardEngine) -> int:
    return engine.report().version


def stage(engine: ShardEngine, batch: BatchId, attempt: int, base: int = 0) -> str:
    """The result of a push as skipped, which fits shards of every plan."""
    request = a_push(batch, attempt, base=base, skipped=True)
    fence = replace(request.fence, plan_hash=engine.plan.hash)
    return engine.push(replace(request, fence=fence), Shared([]), 0).outcome


def one_of_two() -> ShardEngine:
    """A shard that knows nothing about the other one but what workers tell."""
    engine = engine_of(TWO, policy=ROUNDS)
    extents = tuple(shard_extents(TWO, 0))
    values = aligned_empty(TWO.arenas[0].shard_length(0), "float32")
    values.fill(0)
    request = InitializeRequest(replace(a_push().fence, plan_hash=TWO.hash), extents)
    engine.initialize(request, Shared([values.view(np.uint8)]), 0)
    return engine


def pull(engine: ShardEngine, number: int | None, *staged: Attempt) -> int:
    """The version that a pull brings which tells of attempts that all shards hold."""
    fence = replace(a_push().fence, plan_hash=engine.plan.hash)
    told = tuple(StagedEverywhere(attempt, ()) for attempt in staged)
    return engine.pull(PullRequest(fence, "w", number, staged=told), 0).version


def test_the_only_shard_applies_a_round_as_soon_as_it_holds_all_of_it() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST, SECOND))
    push(engine, B, value=3.0, attempt=2)
    assert version(engine) == 0
    push(engine, A, value=1.0, attempt=1)
    assert (version(engine), value(engine)) == (1, -2.0)
    push(engine, C, base=1, attempt=3)
    push(engine, D, base=1, attempt=4)
    assert (version(engine), value(engine)) == (2, -3.0)
    assert engine.report().staged_now == 0


def test_a_plan_may_come_after_the_pushes() -> None:
    engine = shard_of(ROUNDS)
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    assert version(engine) == 0
    engine.commands.plan(ahead(FIRST))
    assert version(engine) == 1


def test_a_plan_that_comes_again_changes_nothing() -> None:
    engine = shard_of(ROUNDS)
    for _ in range(2):
        engine.commands.plan(ahead(FIRST, SECOND))
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    engine.commands.plan(ahead(FIRST, SECOND))
    assert (version(engine), value(engine)) == (1, -1.0)
    push(engine, C, base=1, attempt=3)
    push(engine, D, base=1, attempt=4)
    assert version(engine) == 2


def test_its_decision_may_come_as_well() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST))
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    engine.commands.decide(FIRST)
    assert (version(engine), value(engine)) == (1, -1.0)


def test_a_plan_of_another_generation_is_refused() -> None:
    engine = shard_of(ROUNDS)
    with pytest.raises(StaleGeneration, match="decided ahead in generation 2; shard 0 is in 1"):
        engine.commands.plan(ahead(replace(FIRST, generation=2)))
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    assert version(engine) == 0


def test_there_is_a_bound() -> None:
    engine = shard_of(ROUNDS)
    many = [decision((A, 1), number=number) for number in range(MOST_AHEAD + 1)]
    engine.commands.plan(ahead(*many[:-1]))
    with pytest.raises(ResourceExhausted, match=f"expected at most {MOST_AHEAD}"):
        engine.commands.plan(ahead(many[-1]))


def test_an_attempt_that_the_round_does_not_name_is_refused() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST))
    for batch, attempt in ((A, 9), (C, 3)):
        with pytest.raises(
            InvalidArgument, match="is not of round 0, as rounds were decided ahead"
        ):
            push(engine, batch, attempt=attempt)
    assert engine.report().staged_now == 0


def test_a_gradient_of_a_later_round_takes_no_place_of_this_one() -> None:
    """Its worker has the lease of it, but has no parameters that it could be computed from."""
    engine = shard_of(ROUNDS)
    push(engine, C, attempt=3)
    push(engine, D, attempt=4)
    engine.commands.plan(ahead(FIRST, SECOND))
    assert engine.report().staged_now == 0
    with pytest.raises(InvalidArgument, match="is not of round 0, as rounds were decided ahead"):
        push(engine, C, attempt=3)
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    assert version(engine) == 1


def test_a_round_with_a_batch_that_the_shard_had_before() -> None:
    engine = shard_of(ROUNDS)
    engine._held.applied.add(A)
    engine.commands.plan(ahead(FIRST))
    push(engine, B, value=3.0, attempt=2)
    assert (version(engine), value(engine)) == (1, -3.0)


def test_one_of_several_shards_waits_until_all_hold_every_attempt() -> None:
    engine = one_of_two()
    engine.commands.plan(ahead(FIRST))
    stage(engine, A, 1)
    stage(engine, B, 2)
    assert version(engine) == 0
    with pytest.raises(NotReady):
        pull(engine, 1, Attempt(A, 1))
    assert version(engine) == 0
    assert pull(engine, 1, Attempt(B, 2)) == 1


def test_the_attempts_on_all_shards_may_be_named_before_the_plan_comes() -> None:
    engine = one_of_two()
    stage(engine, A, 1)
    stage(engine, B, 2)
    assert pull(engine, None, Attempt(A, 1), Attempt(B, 2)) == 0
    engine.commands.plan(ahead(FIRST))
    assert version(engine) == 1


def test_news_of_another_attempt_counts_for_nothing() -> None:
    engine = one_of_two()
    engine.commands.plan(ahead(FIRST))
    stage(engine, B, 2)
    # Not staged here, and staged later.
    pull(engine, None, Attempt(A, 1), Attempt(A, 7), Attempt(B, 2))
    stage(engine, A, 1)
    assert version(engine) == 0
    assert pull(engine, None, Attempt(A, 1)) == 1


def revoke(engine: ShardEngine) -> None:
    engine.commands.revoke(Revocation(1, "another", ends_ahead=True))


def begin_again(engine: ShardEngine) -> None:
    engine.commands.begin(Begin(2, 1, keep=True, settings=ROUNDS, keys=AUTHORITY.keys))


def stand(engine: ShardEngine) -> None:
    assert engine.commands.stand() == (1, 0, True)


def test_a_shard_keeps_them_over_the_revocation_of_a_worker_without_a_part() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST))
    engine.commands.revoke(Revocation(1, "another"))
    push(engine, A, attempt=1)
    push(engine, B, attempt=2)
    assert version(engine) == 1


@pytest.mark.parametrize("order", [revoke, stand])
def test_a_shard_forgets_them(order: Callable[[ShardEngine], None]) -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST, SECOND))
    push(engine, A, attempt=1)
    order(engine)
    push(engine, B, attempt=2)
    assert version(engine) == 0
    # They count by a decision, or once they are told again.
    engine.commands.plan(ahead(FIRST))
    assert version(engine) == 1


def test_another_generation_forgets_them_and_what_is_staged() -> None:
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST))
    push(engine, A, attempt=1)
    begin_again(engine)
    for batch, attempt in ((A, 5), (B, 6)):
        push(engine, batch, attempt=attempt, generation=2)
    assert version(engine) == 0
    engine.commands.plan(ahead(decision((A, 5), (B, 6), generation=2)))
    assert version(engine) == 1


def test_a_generation_begins_with_the_round_that_only_the_other_shard_applied() -> None:
    engine = one_of_two()
    engine.commands.plan(ahead(FIRST))
    stage(engine, A, 1)
    stage(engine, B, 2)
    revoke(engine)
    assert version(engine) == 0
    order = Begin(2, 1, keep=True, decision=FIRST, settings=ROUNDS, keys=AUTHORITY.keys)
    begun = engine.commands.begin(order)
    assert begun is not None
    assert (begun.version, engine.applied().contains(A)) == (1, True)


class Interrupted:
    """A shard's state; a reader of where it stands is held up until ``meanwhile`` is over."""

    def __init__(self, held: Parameters, meanwhile: Callable[[], object]) -> None:
        self._held = held
        self._meanwhile = meanwhile

    @property
    def standing(self) -> ShardPosition:
        standing = self._held.standing
        self._meanwhile()
        return standing

    def __getattr__(self, name: str) -> object:
        return getattr(self._held, name)


def test_the_first_report_that_knows_a_revocation_has_the_version_that_stays() -> None:
    """The coordinator begins the next generation from it."""
    engine = shard_of(ROUNDS)
    engine.commands.plan(ahead(FIRST))
    push(engine, A, attempt=1)

    def round_ends() -> None:
        commands._held = held
        push(engine, B, attempt=2)
        revoke(engine)

    commands = engine.commands
    held = commands._held
    commands._held = Interrupted(held, round_ends)  # type: ignore[assignment]
    early = engine.report()
    assert (early.version, early.revoked) == (0, 0)
    late = engine.report()
    assert (late.version, late.revoked) == (1, 1)


# -- proofs ----------------------------------------------------------------------------------


def receipts(*shards: int, attempt: int = 1, worker: str = "w") -> tuple[bytes, ...]:
    grant = AUTHORITY.keys.grant
    return tuple(receipt_of(grant, worker, 1, A, attempt, shard, False) for shard in shards)


def proven(given: tuple[bytes, ...], attempt: int = 1) -> PullRequest:
    engine = one_of_two()
    fence = replace(a_push().fence, plan_hash=TWO.hash, session=session_of("w"))
    staged = (StagedEverywhere(Attempt(A, attempt), given),)
    return engine.credentials.pull(PullRequest(fence, "", 1, staged=staged), "")


def test_receipts_of_all_shards_prove_that_they_hold_an_attempt() -> None:
    assert proven(receipts(0, 1)).worker == "w"


@pytest.mark.parametrize(
    "given",
    [
        (),
        receipts(0),
        receipts(1, 0),
        (receipts(0)[0], b""),
        receipts(0, 1, worker="another"),
        receipts(0, 1, attempt=2),
    ],
    ids=["none", "one", "swapped", "empty", "of another worker", "of another attempt"],
)
def test_others_are_denied(given: tuple[bytes, ...]) -> None:
    with pytest.raises(AccessDenied, match="has not vouched for it") as caught:
        proven(given)
    assert caught.value.code == "PS308"


def test_a_push_that_comes_again_after_its_round_had_its_batch_already() -> None:
    engine = shard_of(Policy(mode="sync", replicas=1))
    engine.commands.plan(ahead(decision((A, 1))))
    push(engine, A, attempt=1)
    assert push(engine, A, attempt=1).outcome == "already_applied"
    with pytest.raises(RoundPassed):
        push(engine, B, attempt=2)
