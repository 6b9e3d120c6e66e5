"""The progress bar of a ``fit`` that no callback looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.worker.fit.test_schedule import schedule
from worker.fit.progress import EpochProgress

HEADER = "epoch,step,loss,mae,learning_rate\n"


class Bar:
    """Notes what a ``keras.callbacks.ProgbarLogger`` is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_epoch_begin(self, epoch: int) -> None:
        self.told.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.told.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.told.append(logs)


def test_epochs_end_once_their_results_are_known(tmp_path: Path) -> None:
    bar, history = Bar(), tmp_path / "history.csv"
    progress = EpochProgress(bar, schedule(), history)
    assert progress.shown
    progress.at(0)
    progress.at(5)
    progress.at(9)
    assert bar.told == ["epoch 1", 0, 1]
    # The second epoch trains, and the first has no results yet.
    progress.at(14)
    history.write_text(HEADER + "1,3,,,0.1\n")
    progress.at(15)
    assert bar.told[3:] == [2]
    history.write_text(HEADER + "1,3,0.5,0.25,0.1\n")
    progress.at(15)
    assert bar.told[4:] == [{"loss": 0.5, "mae": 0.25}, "epoch 2", 0]
    history.write_text(HEADER + "1,3,0.5,0.25,0.1\n2,6,0.4,0.2,0.1\n3,9,,,0.1\n")
    progress.at(40)
    assert bar.told[7:] == [2, {"loss": 0.4, "mae": 0.2}, "epoch 3", 2]
    del bar.told[:]
    # The end of the job, from which all results are known.
    for epoch in range(1, 5):
        progress.ended(epoch, {"loss": epoch / 10})
    assert bar.told == [{"loss": 0.3}, "epoch 4", 2, {"loss": 0.4}]
    progress.at(40)
    assert bar.told[-1] == {"loss": 0.4}


def test_nothing_is_shown_without_a_bar(tmp_path: Path) -> None:
    progress = EpochProgress(None, schedule(), tmp_path / "history.csv")
    assert not progress.shown
    progress.ended(1, {"loss": 1.0})
