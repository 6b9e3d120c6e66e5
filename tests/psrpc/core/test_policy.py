"""Policies: what is refused and why, and that they come back from JSON as they went."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrpc.core.errors import InvalidJob
from psrpc.core.policy import _FITS, _WHY, MODES, SETTINGS, DelayCompensation, Policy, fitting

SYNC = {"mode": "sync", "replicas": 4}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "turbo"}, "mode is 'turbo'; expected async or sync or ssp"),
        ({"mode": "sync"}, "replicas is not set"),
        ({"mode": "ssp"}, "staleness is not set"),
        (
            {"mode": "ssp", "staleness": -1},
            "staleness is -1; expected a whole number of at least 0",
        ),
        ({"mode": "ssp", "staleness": True}, "staleness is True"),
        ({**SYNC, "aggregate": 5}, "aggregate is 5, but a round has only 4"),
        ({**SYNC, "aggregate": 0}, "aggregate is 0; expected a whole number of at least 1"),
        ({**SYNC, "aggregate": 3, "speculate": True}, "speculate and aggregate exclude each other"),
        ({**SYNC, "aggregate": 3, "balance": True}, "balance and aggregate exclude each other"),
        ({**SYNC, "max_staleness": 2}, "max_staleness is for mode async, but mode is 'sync'"),
        ({**SYNC, "staleness_lr": "inverse"}, "gradients of a round are not stale"),
        ({**SYNC, "round_deadline_s": 0}, "round_deadline_s is 0; expected a number above 0"),
        ({**SYNC, "round_deadline_s": float("nan")}, "round_deadline_s is nan"),
        ({"speculate": True}, "speculate is for mode sync, but mode is 'async'"),
        ({"replicas": 3}, "replicas is for mode sync, but mode is 'async'"),
        ({"speculate": 1}, "speculate is 1; expected true or false"),
        ({"staleness_lr": "linear"}, "staleness_lr is 'linear'; expected inverse or None"),
        ({"delay_compensation": "c"}, "expected constant or adaptive or None"),
        ({"dc_lambda": 0.1}, "delay_compensation is not; nothing is corrected"),
        ({"delay_compensation": "adaptive", "dc_decay": 1.0}, "dc_decay is 1.0"),
        ({"delay_compensation": "constant", "dc_decay": 0.5}, "for delay_compensation 'adaptive'"),
        ({"mode": "ssp", "staleness": 1, "max_staleness": 1}, "ssp bounds clocks with staleness"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        Policy(**settings)
    assert reason in str(refused.value)


def test_every_setting_says_for_which_modes_it_is() -> None:
    assert set(SETTINGS) == {"mode", *_FITS}
    assert set(_WHY) == set(_FITS)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any that is allowed."""
    mode = draw(st.sampled_from(MODES))
    if mode == "sync":
        replicas = draw(st.integers(1, 9))
        aggregate = draw(st.none() | st.integers(1, replicas))
        return Policy(
            mode=mode,
            replicas=replicas,
            aggregate=aggregate,
            speculate=aggregate is None and draw(st.booleans()),
            balance=aggregate is None and draw(st.booleans()),
            round_deadline_s=draw(st.none() | st.floats(0.001, 1e6)),
        )
    kinds: tuple[DelayCompensation | None, ...] = (None, "constant", "adaptive")
    compensation = draw(st.sampled_from(kinds))
    decay = draw(st.floats(0, 1, exclude_max=True)) if compensation == "adaptive" else 0.95
    return Policy(
        mode=mode,
        staleness=draw(st.integers(0, 99)) if mode == "ssp" else None,
        max_staleness=draw(st.none() | st.integers(0, 99)) if mode == "async" else None,
        staleness_lr=draw(st.sampled_from((None, "inverse"))),
        delay_compensation=compensation,
        dc_lambda=draw(st.none() | st.floats(0.001, 10)) if compensation else None,
        dc_decay=decay,
    )


@given(policies())
def test_a_policy_comes_back_from_json(policy: Policy) -> None:
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    assert fitting(policy.mode, policy.changed()) == policy.changed()
    assert policy.taken <= max(1, policy.open)
    assert policy.backups == (policy.rounds and policy.taken < policy.open)


def test_words() -> None:
    assert str(Policy()) == "async"
    assert str(Policy(mode="ssp", staleness=4)) == "ssp staleness=4"
    words = "sync replicas=12 aggregate=9 round_deadline_s=2.5"
    assert str(Policy(mode="sync", replicas=12, aggregate=9, round_deadline_s=2.5)) == words


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(InvalidJob, match="a policy has no speed"):
        Policy.from_json({"mode": "async", "speed": 3})


def test_lambda_is_the_papers_where_none_is_said() -> None:
    assert Policy(delay_compensation="constant").compensation == 0.04
    assert Policy(delay_compensation="adaptive").compensation == 2.0
    assert Policy(delay_compensation="adaptive", dc_lambda=0.5).compensation == 0.5
    assert Policy().compensation == 0.0
