"""Warnings of a job: those of many epochs are one."""

from __future__ import annotations

from coordinator.records.notes import JobWarnings, NotEvaluated


def test_epochs_without_evaluation_are_one_line_in_its_place() -> None:
    warnings = JobWarnings()
    warnings.add("first", NotEvaluated(2, ": gone"))
    assert warnings.kept == ["first", "epoch 3 is not evaluated: gone"]
    warnings.add("worker-2 died")
    warnings.add(*(NotEvaluated(epoch, ": gone") for epoch in (2, 3, 41)))
    warnings.add(NotEvaluated(2, ": busy"))
    assert warnings.kept == [
        "first",
        "3 epochs (the newest is 42) are not evaluated: gone",
        "worker-2 died",
        "epoch 3 is not evaluated: busy",
    ]
