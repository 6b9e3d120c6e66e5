"""Skipped batches and diverging losses of a run."""

from __future__ import annotations

from pathlib import Path

from tests.coordinator.training_run import training_run


def test_data_that_is_not_finite_is_named_with_the_batch_that_was_skipped(tmp_path: Path) -> None:
    with training_run(tmp_path) as parts:
        parts.begin()
        parts.step(skipped=True, not_finite="x has a NaN in record 37")
        [said, *_] = parts.warnings.kept
        assert said.endswith(
            "were skipped: their gradient is NaN or infinite (w); look at the data: x has a NaN in "
            "record 37"
        )


def test_finite_divergence_stops_the_job(tmp_path: Path) -> None:
    with training_run(tmp_path, train_records=4000, epochs=1) as parts:
        training = parts.begin()
        for loss in [1.0] * 20 + [50.0] * 199:
            parts.step(loss)
        assert str(training.failure) == "None"
        for _ in range(5):
            parts.step(50.0)
        assert "diverged" in str(training.failure)
        assert parts.store.get("first_loss") == 1.0


def test_an_attended_job_is_warned_and_goes_on(tmp_path: Path) -> None:
    with training_run(tmp_path, train_records=4000, epochs=1, attended=True) as parts:
        training = parts.begin()
        training.allow(40)
        for _ in range(15):
            parts.step(skipped=True)
        assert training.failure is None
        assert len([said for said in parts.warnings.kept if said.startswith("PS603: ")]) == 1
