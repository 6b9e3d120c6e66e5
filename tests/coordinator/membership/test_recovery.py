"""Where shards begin: every row of the table in docs/design/0008, and what holds in all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership.recovery import Origin, choose_origin, go_over, went_back, why_restore
from psrpc.core.commands import Begin, Decision
from psrpc.core.errors import CheckpointError
from psrpc.core.policy import ASYNC, Mode, Policy
from psrpc.core.shard_reports import HeldState

NEW = HeldState(1)
CHECKPOINT = "checkpoints/step-00000004"

POLICIES: dict[Mode, Policy] = {"async": ASYNC, "sync": Policy(mode="sync", replicas=2)}


def held(version: int = 5, generation: int = 3) -> HeldState:
    return HeldState(1, generation, initialized=True, version=version)


def decision(number: int, generation: int = 3) -> Decision:
    return Decision(generation, number, ())


def choose(
    holdings: list[HeldState],
    mode: Mode = "async",
    *,
    since: int = 1,
    newest: Decision | None = None,
    checkpoint: str | None = CHECKPOINT,
    committed: bool = True,
) -> Origin:
    return choose_origin(
        holdings,
        POLICIES[mode],
        4,
        1,
        since=since,
        decision=newest,
        checkpoint=checkpoint,
        committed=committed,
    )


def words(origin: Origin) -> list[str]:
    return [
        "keep" if begin.keep else "restore" if begin.restore else "fresh" for begin in origin.begins
    ]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("holdings", "checkpoint", "committed", "expected"),
    [
        ([NEW, NEW], None, False, ["fresh", "fresh"]),
        ([NEW, held(0)], None, False, ["fresh", "fresh"]),
        ([NEW, NEW], CHECKPOINT, True, ["restore", "restore"]),
        # It was committed, and its coordinator died before it had noted that.
        ([NEW, NEW], CHECKPOINT, False, ["restore", "restore"]),
        ([held(), held()], None, True, ["keep", "keep"]),
    ],
)
def test_in_every_mode(
    mode: Mode,
    holdings: list[HeldState],
    checkpoint: str | None,
    committed: bool,
    expected: list[str],
) -> None:
    origin = choose(holdings, mode, checkpoint=checkpoint, committed=committed)
    assert words(origin) == expected
    assert origin.kept == (expected == ["keep", "keep"])
    assert {(begin.generation, begin.policy) for begin in origin.begins} == {(4, 1)}


def test_async_shards_keep_what_they_hold_whatever_the_others_do() -> None:
    origin = choose([held(9), NEW, held(2, generation=1)])
    assert words(origin) == ["keep", "restore", "keep"]
    assert origin.reason == f"shard 1 holds no parameters: it restores {CHECKPOINT}"
    origin = choose([NEW, held(9), NEW])
    assert origin.reason == f"shards 0, 2 hold no parameters: they restore {CHECKPOINT}"


@pytest.mark.parametrize(
    ("versions", "newest", "kept"),
    [
        ([5, 5], None, True),
        ([5, 6], None, False),
        ([5, 5], 5, True),  # seen by none
        ([5, 6], 5, True),  # seen by one
        ([6, 6], 5, True),  # seen by both
        ([4, 5], 5, False),
        ([6, 7], 5, False),
        ([5, 7], 6, False),
    ],
)
def test_sync_shards_keep_what_differs_by_the_newest_decision_at_most(
    versions: list[int], newest: int | None, kept: bool
) -> None:
    last = None if newest is None else decision(newest)
    origin = choose([held(version) for version in versions], "sync", newest=last)
    if kept:
        keep = Begin(4, 1, keep=True, decision=last, settings=POLICIES["sync"])
        assert origin.begins == (keep, keep)
    else:
        assert words(origin) == ["restore", "restore"]
        assert f"stand at rounds {sorted(set(versions))}" in origin.reason


def test_sync_shards_of_several_generations_keep_theirs_if_none_went_back_in_between() -> None:
    """The coordinator died twice while it formed a generation; one shard had begun."""
    shards = [held(5, generation=3), held(6, generation=2)]
    assert words(choose(shards, "sync", since=2, newest=decision(5, 2))) == ["keep", "keep"]
    back = choose(shards, "sync", since=3)
    assert words(back) == ["restore", "restore"]
    assert "stand at generations [2, 3]" in back.reason


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_restored_parameters_may_get_another_version(mode: Mode) -> None:
    origin = choose_origin(
        [NEW, held(9)],
        POLICIES[mode],
        4,
        2,
        since=1,
        decision=None,
        checkpoint=CHECKPOINT,
        committed=True,
        version=7,
    )
    assert {begin.version for begin in origin.begins if begin.restore} == {7}
    assert {begin.version for begin in origin.begins if begin.keep} <= {None}


def test_when_the_policy_changes_all_keep_theirs_and_stand_at_the_global_step() -> None:
    # Without rounds each has counted the pushes that it has seen.
    origin = go_over([held(9), held(8)], POLICIES["sync"], 5, 2, 12)
    keep = Begin(5, 2, keep=True, settings=POLICIES["sync"], version=12)
    assert origin == Origin((keep, keep), "policy 2 stands: sync replicas=2", kept=True)


def test_a_lost_shard_takes_all_of_a_sync_job_back() -> None:
    assert words(choose([held(), NEW, held()], "sync", newest=decision(4))) == ["restore"] * 3


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_without_a_good_checkpoint_what_is_lost_is_lost(mode: Mode) -> None:
    with pytest.raises(CheckpointError, match="shard 1 holds no parameters, and no checkpoint"):
        choose([held(), NEW], mode, checkpoint=None)


def test_before_the_first_checkpoint_sync_shards_that_differ_begin_with_nothing() -> None:
    shards = [held(0, generation=2), held(0, generation=1)]
    origin = choose(shards, "sync", since=2, checkpoint=None, committed=False)
    assert words(origin) == ["fresh", "fresh"]


holdings = st.builds(
    lambda initialized, generation, version: (
        HeldState(1, generation, True, version) if initialized else HeldState(1)
    ),
    st.booleans(),
    st.integers(1, 3),
    st.integers(3, 7),
)


@pytest.mark.slow
@given(
    shards=st.lists(holdings, min_size=1, max_size=4),
    mode=st.sampled_from(["async", "sync"]),
    since=st.integers(1, 3),
    newest=st.none() | st.integers(3, 6),
    checkpoint=st.none() | st.just(CHECKPOINT),
    committed=st.booleans(),
)
def test_nothing_is_kept_that_does_not_fit_and_nothing_lost_unsaid(
    shards: list[HeldState],
    mode: Mode,
    since: int,
    newest: int | None,
    checkpoint: str | None,
    committed: bool,
) -> None:
    last = decision(newest) if newest is not None and mode == "sync" else None
    try:
        origin = choose(
            shards, mode, since=since, newest=last, checkpoint=checkpoint, committed=committed
        )
    except CheckpointError:
        assert committed
        assert checkpoint is None
        return
    told = words(origin)
    kept = [holding for holding, word in zip(shards, told, strict=True) if word == "keep"]
    assert all(holding.initialized for holding in kept)
    assert (
        origin.kept
        == (len(kept) == len(shards))
        == (why_restore(shards, POLICIES[mode], since, last) == "")
    )
    assert ("fresh" in told) <= (not committed and checkpoint is None and set(told) == {"fresh"})
    assert all((begin.decision is not None) <= begin.keep for begin in origin.begins)
    if mode == "sync":
        assert len(set(told)) == 1
        if kept:
            # With the decision all come to one round of one history.
            after = {
                last.round + 1 if last and holding.version == last.round else holding.version
                for holding in kept
            }
            assert len(after) == 1
            assert min(holding.generation for holding in kept) >= since


def test_the_reason_names_the_batches_to_be_repeated() -> None:
    assert went_back(3, 215, 200, "checkpoints/step-00000200.g2") == (
        "generation 3: back to step 200 (checkpoints/step-00000200.g2): 15 steps are done again"
    )
    assert (
        went_back(2, 1, 0, "")
        == "generation 2: back to step 0 (no checkpoint): 1 step is done again"
    )
    assert went_back(2, 24075, 24055, "checkpoints/step-00024034") == (
        "generation 2: back to step 24055 (checkpoints/step-00024034, which holds 21 steps beyond "
        "its name): 20 steps are done again"
    )
    assert "which holds 1 step beyond its name" in went_back(2, 5, 4, "checkpoints/step-00000003")
    assert not went_back(2, 0, 0, "")
    assert not went_back(2, 7, 8, CHECKPOINT)
