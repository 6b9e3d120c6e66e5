"""The table of the consistency modes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.modes import ROWS, Measured, Row, measure, measure_row, table
from benchmarks.peers import Figure

ROW = Row("mnist_dnn", 2, systems=("async", "sync", "torch_ddp"))


def test_every_row_has_a_job_and_settings() -> None:
    for row in ROWS:
        assert row.job.is_file(), row
    assert ROWS[1].settings("sync") == ("mode=sync", "replicas=2", "epochs=4")
    assert ROWS[0].case("tf_single") == "mnist_dnn_single"
    assert ROWS[1].case("torch_ddp") == "mnist_dnn_2w"


def test_ratios_are_taken_within_a_run_and_targets_are_said() -> None:
    rates = {"async": (100.0, 200.0, 300.0), "sync": (90.0, 160.0, 270.0)}
    measured = [
        Measured(run, ROW.name, system, Figure(1.0, rate))
        for system, found in rates.items()
        for run, rate in enumerate(found, 1)
    ]
    measured.append(Measured(1, ROW.name, "torch_ddp", Figure(miss="No module named 'torch'")))
    text = table(measured, [ROW])
    assert "| mnist_dnn, 2 × 1 | 200 | – | 160 | – | – | – | – |" in text
    assert "| mnist_dnn, 2 × 1: sync, K = workers ÷ async | 0.90× (≥ 0.85×, met) |" in text
    assert "sync, K = workers ÷ PyTorch DDP | missing (≥ 1×) |" in text
    assert "- mnist_dnn, 2 × 1, PyTorch DDP: No module named 'torch'" in text


def test_one_worker_has_a_target_of_its_own() -> None:
    row = Row("mnist_dnn", 1, systems=("async", "sync"))
    measured = [
        Measured(1, row.name, system, Figure(1.0, rate))
        for system, rate in (("async", 100.0), ("sync", 82.0))
    ]
    assert "0.82× (≥ 0.8×, met)" in table(measured, [row])


def test_a_peer_that_is_absent_is_a_miss(tmp_path: Path) -> None:
    assert measure(ROW, "torch_ddp", tmp_path).miss == f"no sync_ddp.py in {tmp_path}"


def test_every_second_run_turns_the_order_of_the_systems(tmp_path: Path) -> None:
    row = Row("mnist_dnn", 2, systems=("tf_mwms", "torch_ddp"))
    orders = [[one.system for one in measure_row(run, row, tmp_path)] for run in (1, 2)]
    assert orders == [["tf_mwms", "torch_ddp"], ["torch_ddp", "tf_mwms"]]
