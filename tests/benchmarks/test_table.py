from __future__ import annotations

import pytest

from benchmarks.peers import Figure
from benchmarks.table import Results, Sample, markdown, number, tables, verdict
from benchmarks.workloads import CASES, TARGETS, Case

DENSE = Case("dense_1x64MB")
MNIST = Case("mnist_dnn", workers=3)


def samples(case: Case, who: str, *values: float | str) -> list[Sample]:
    """One for each run: milliseconds, or why there are none."""
    return [
        Sample(run, case.name, who, Figure(miss=v) if isinstance(v, str) else Figure(v, 1e3 / v))
        for run, v in enumerate(values)
    ]


def test_shared_memory_stands_against_the_best_peer_of_its_run() -> None:
    results = Results(
        samples(DENSE, "shm", 10, 20, 40)
        + samples(DENSE, "tf", 30, 30, 30)
        + samples(DENSE, "torch", 50, 28, "killed")
    )
    # 30 / 10, 28 / 20, 30 / 40.
    assert results.ratio(DENSE, "shm") == pytest.approx(1.4)
    assert results.median(DENSE, "shm") == 20
    assert results.median(DENSE, "torch") == 39


def test_tcp_stands_against_tensorflow_alone() -> None:
    results = Results(
        samples(DENSE, "tcp", 20, "cut off")
        + samples(DENSE, "tf", 30, 30)
        + samples(DENSE, "torch", 5, 5)
    )
    assert results.ratio(DENSE, "tcp") == 1.5
    assert results.ratio(DENSE, "tcp_bf16") is None
    assert results.median(DENSE, "tcp_bf16") is None


def test_mnist_is_counted_in_steps_per_second() -> None:
    results = Results(samples(MNIST, "shm", 2.0) + samples(MNIST, "tf", 8.0))
    assert results.median(MNIST, "shm") == 500.0
    assert results.ratio(MNIST, "shm") == 4.0


@pytest.mark.parametrize(
    ("ratio", "target", "text"),
    [
        (2.0, 2.0, "2.00× (≥ 2×, met)"),
        (1.999, 2.0, "2.00× (≥ 2×, **missed**)"),
        (1.5, None, "1.50×"),
        (None, 1.3, "missing (≥ 1.3×)"),
        (None, None, "–"),
    ],
)
def test_a_ratio_is_judged(ratio: float | None, target: float | None, text: str) -> None:
    assert verdict(ratio, target) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.17849, "0.178"), (3.5, "3.5"), (99.4, "99.4"), (304.2, "304")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_every_target_has_its_case() -> None:
    transports = {case.name: case.transports for case in CASES}
    for name, targets in TARGETS.items():
        assert set(targets) <= set(transports[name])


def test_the_tables() -> None:
    found = [
        *samples(DENSE, "shm", 30.0),
        *samples(DENSE, "tcp", 80.0),
        *samples(DENSE, "tcp_bf16", 50.0),
        *samples(DENSE, "tf", 110.0),
        *samples(DENSE, "torch", 75.0),
        *samples(DENSE, "ray", "No module named 'ray'"),
        *samples(DENSE, "memcpy", 16.0),
        *samples(DENSE, "loopback", 44.0),
        *samples(MNIST, "shm", 2.5),
        *samples(MNIST, "tf", 8.0),
    ]
    lines = tables(Results(found), [DENSE, MNIST]).splitlines()
    assert lines[4:] == [
        "| dense_1x64MB | 30 | 80 | 50 | 110 | 75 | – | 2.50× (≥ 2×, met) | 1.38× (≥ 1.3×, met) "
        "| 2.20× (≥ 1.8×, met) | 16 | 44 |",
        "",
        "Steps per second of all workers, medians.",
        "",
        "| workload | shared memory | TCP | TF | shared memory ÷ TF | TCP ÷ TF |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| mnist_dnn_3w | 400 | – | 125 | 3.20× (≥ 3×, met) | missing (≥ 2.5×) |",
        "",
        "Missing:",
        "",
        "- dense_1x64MB, Ray: No module named 'ray'",
    ]
    # Every row has as many cells as its header.
    cells = {line.count("|") for line in lines[2:5]}
    assert len(cells) == 1


def test_markdown() -> None:
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
