"""Shards and workers are compared in what they say of skipped batches."""

from __future__ import annotations

from coordinator.skips import PATIENCE_S, SkipAudit

NAME = "worker-3"


def test_a_worker_that_reports_what_it_skips_is_left_alone() -> None:
    audit = SkipAudit()
    audit.reported(NAME)
    audit.counted(0, {NAME: 1})
    audit.counted(1, {NAME: 1})
    assert audit.judge([NAME], 0.0) == []
    assert audit.judge([NAME], 10 * PATIENCE_S) == []


def test_a_report_may_come_later_than_the_count() -> None:
    audit = SkipAudit()
    audit.counted(0, {NAME: 1})
    assert audit.judge([NAME], 0.0) == []
    audit.reported(NAME)
    assert audit.judge([NAME], PATIENCE_S) == []
    audit.counted(0, {NAME: 2})
    assert audit.judge([NAME], PATIENCE_S) == [], "another one waits from now on"
    assert audit.judge([NAME], 2 * PATIENCE_S - 0.1) == []


def test_one_that_skips_in_silence_is_named_with_the_shard_and_what_to_do() -> None:
    audit = SkipAudit()
    audit.reported(NAME)
    audit.counted(0, {NAME: 1})
    audit.counted(1, {NAME: 600, "worker-1": 2})
    assert audit.judge([NAME], 5.0) == []
    (warning,) = audit.judge([NAME], 5.0 + PATIENCE_S)
    assert NAME in warning
    assert "shard 1" in warning
    assert f"coordinator revoke {NAME}" in warning


def test_a_worker_that_is_gone_could_not_report() -> None:
    audit = SkipAudit()
    audit.counted(0, {NAME: 1})
    assert audit.judge([NAME], 0.0) == []
    assert audit.judge([], PATIENCE_S) == []
    assert audit.judge([NAME], PATIENCE_S) == [], "it is judged anew"
