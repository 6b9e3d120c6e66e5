from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compression import (
    JOB,
    MODES,
    PAGE,
    SHARDS,
    VARIANTS,
    Sample,
    parser,
    plan_runs,
    read_samples,
    tables,
    times_ms,
)
from benchmarks.payload import Payload, measure_payload
from benchmarks.report import replace_section, write_json
from benchmarks.steps import Steps
from benchmarks.workloads import WARMUP
from worker.loop.step_times import PARTS

PAYLOADS = {name: Payload(50_000, 150_000) for name in VARIANTS} | {
    "float32": Payload(200_000, 200_000)
}


def planned(*arguments: str, known: tuple[Sample, ...] = ()) -> list[Sample]:
    return list(plan_runs(parser().parse_args(arguments), {sample.key for sample in known}))


def worker(**parts: float) -> Steps:
    """One whose steps take 8 ms, made of ``parts``, in seconds."""
    steps = WARMUP + 3
    columns = {f"{part}_s": np.full(steps, parts.get(part, 0.0)) for part in PARTS}
    return Steps(columns | {"start_s": np.arange(steps) * 0.008})


def test_the_parts_of_a_step_are_told_apart() -> None:
    sync = worker(compute=0.001, push=0.002, pull=0.003, commit=0.001)
    assert times_ms([sync]) == pytest.approx({"step_ms": 8, "compute_ms": 1, "exchange_ms": 5})
    asynchronous = [worker(compute=0.002, push_pull=0.004)] * 2
    assert times_ms(asynchronous)["exchange_ms"] == pytest.approx(4)


def test_the_warmup_does_not_count() -> None:
    slow_at_first = worker(compute=0.001)
    slow_at_first.columns["compute_s"][:WARMUP] = 100
    assert times_ms([slow_at_first])["compute_ms"] == pytest.approx(1)


def test_everything_is_run_turn_by_turn() -> None:
    found = planned("--runs", "2", "--only", "int8", "--only", "float32", "--mode", "async")
    assert [(s.part, s.variant, s.run, s.epochs) for s in found] == [
        ("time", "int8", 0, 2),
        ("time", "float32", 0, 2),
        ("time", "int8", 1, 2),
        ("time", "float32", 1, 2),
        ("accuracy", "int8", 0, 15),
        ("accuracy", "float32", 0, 15),
    ]
    assert len(planned("--part", "accuracy", "--seeds", "3")) == 3 * len(MODES) * len(VARIANTS)


def test_known_figures_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert read_samples(file) == read_samples(None) == []
    first, second, *others = planned("--part", "accuracy", "--epochs", "3")
    done = [replace(first, accuracy=0.98), replace(second, miss="it diverged")]
    write_json(file, {"samples": [asdict(sample) for sample in done]})
    known = tuple(read_samples(file))
    assert known == tuple(done)
    assert planned("--part", "accuracy", "--epochs", "3", known=known) == others
    # Other epochs are another figure.
    assert len(planned("--part", "accuracy", "--epochs", "4", known=known)) == 2 + len(others)


def test_the_tables() -> None:
    int8 = Sample("accuracy", "sync", "int8", 0, 15)
    time = Sample("time", "sync", "int8", 0, 2)
    samples = [
        replace(int8, accuracy=0.98),
        replace(int8, run=1, accuracy=0.97),
        replace(int8, run=2, epochs=3, accuracy=0.5),
        *(replace(time, run=i, step_ms=ms, compute_ms=1.5, exchange_ms=2.25)
          for i, ms in enumerate([4.0, 9.0, 5.0])),
        replace(int8, mode="async", accuracy=0.96),
        replace(int8, mode="async", variant="topk-0.1", miss="it diverged"),
    ]  # fmt: skip
    found = tables(samples, PAYLOADS, epochs=15)
    assert list(found) == list(MODES)
    sync, asynchronous = (text.splitlines() for text in found.values())
    assert sync[2] == "| float32 | 200.0 | 200.0 | 100% | 3.2 | – | – | – | – |"
    assert sync[5] == (
        "| int8 | 50.0 | 150.0 | 50% | 1.6 | 1.5 | 2.25 | 5 | 0.9750 (0.9800, 0.9700) |"
    )
    assert asynchronous[5].endswith("| – | – | – | 0.9600 |")
    assert asynchronous[-3:] == ["Missing:", "", "- topk-0.1, accuracy: it diverged"]
    assert len({line.count("|") for line in sync}) == 1


def test_the_page_has_a_place_for_each_table() -> None:
    page = PAGE.read_text()
    for mode in MODES:
        replace_section(page, mode, "")


@pytest.mark.slow
def test_the_payload_is_that_of_the_job() -> None:
    elements = 784 * 160 + 4 * 160 * 160 + 5 * 160 + 160 * 10 + 10
    found = {name: measure_payload(JOB, SHARDS, settings) for name, settings in VARIANTS.items()}
    assert found["float32"] == Payload(4 * elements, 4 * elements)
    assert found["bfloat16"] == found["float16"] == Payload(2 * elements, 2 * elements)
    assert found["int8"].pull_nbytes == 4 * elements
    assert found["int8"].push_nbytes == pytest.approx(elements * (1 + 4 / 1024), rel=1e-4)
    assert found["topk-0.01"].push_nbytes == pytest.approx(0.08 * elements, rel=1e-3)
    assert found["topk-0.01"].pull_nbytes == 4 * elements
    assert found["bfloat16+int8"] == Payload(found["int8"].push_nbytes, 2 * elements)
