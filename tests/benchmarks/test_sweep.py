from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest

from benchmarks.answers import AnswerSample
from benchmarks.answers import table as answers_table
from benchmarks.latency import Answers, Probe, answers_during
from benchmarks.memory import MB, MemoryWatch, Peak, bound, cluster_bytes, parse_kilobytes
from benchmarks.report import README
from benchmarks.scaling import POINTS, TITLES, PointSample, flatness
from benchmarks.scaling import table as scaling_table
from benchmarks.shard_memory import MemoryCase, MemorySample
from benchmarks.shard_memory import table as memory_table
from benchmarks.sweep import sections
from benchmarks.workloads import DENSE
from psrpc.core.errors import Unreachable


def test_variables_vary_at_the_same_bytes() -> None:
    sizes = {point.dense.nbytes for point in POINTS if point.sweep == "variables"}
    assert sizes == {16_000_000}
    assert {name: dense.nbytes for name, dense in DENSE.items()} == {
        "dense_1x64MB": 64 << 20,
        "dense_16x4MB": 64 << 20,
        "dense_256x16KB": 4 << 20,
    }
    assert {point.sweep for point in POINTS} == set(TITLES)


def test_a_sweep_is_a_table_of_medians() -> None:
    samples = [
        PointSample("variables", label, transport, run, ms)
        for label, times in (("1", (10.0, 30.0, 20.0)), ("10", (22.0, 22.0, 22.0)))
        for transport in ("shm", "tcp")
        for run, ms in enumerate(times)
    ]
    samples.append(PointSample("variables", "100", "shm", 0, 25.0))
    samples.append(PointSample("variables", "100", "tcp", 0, miss="not done after 600 s"))
    lines = scaling_table(samples).splitlines()
    assert lines[2:7] == [
        "| variables | shared memory | TCP |",
        "| --- | ---: | ---: |",
        "| 1 | 20 | 20 |",
        "| 10 | 22 | 22 |",
        "| 100 | 25 | – |",
    ]
    assert "- shared memory 1.00 … 1.25 (**missed**)" in lines
    assert "- TCP –" in lines
    assert lines[-1] == "- 100, TCP: not done after 600 s"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        ([10.0, 8.0, 12.0], "0.80 … 1.20 (met)"),
        ([10.0, 7.9], "0.79 … 1.00 (**missed**)"),
        ([10.0, None], "–"),
        ([], "–"),
    ],
)
def test_flat_is_within_a_fifth_of_one_variable(ms: list[float | None], text: str) -> None:
    assert flatness(ms) == text


def test_the_bound_of_a_shard() -> None:
    # 2 (1 + 2) 100 MB + (3 + 2) 100 MB + 400 MB.
    assert bound(100 * MB, slots=2, replicas=3, engine="keras") == 1500 * MB
    assert bound(100 * MB, slots=0, replicas=0, engine="numpy") == 500 * MB
    # The largest cluster of the sweep fits into 16 GB.
    assert cluster_bytes(1 << 30, shards=2, workers=1) < 16_000 * MB


def test_memory_is_judged_with_and_without_the_segments() -> None:
    case = MemoryCase("keras", "adam", replicas=2)
    samples = [
        MemorySample(case, 2500 * MB, Peak(3100 * MB, 2300 * MB, 700 * MB, 100 * MB)),
        MemorySample(MemoryCase("numpy", "sgd", "tcp"), 1000 * MB, miss="no memory"),
    ]
    assert memory_table(samples).splitlines()[-2:] == [
        "| keras, adam, sync K=2, shared memory | 3100 | 2300 | 700 | 100 | 2500 | **missed** "
        "| met |",
        "| numpy, sgd, async, TCP | – | – | – | – | 1000 | no memory | – |",
    ]


def test_memory_is_watched_until_the_end() -> None:
    status = "Name:\tpython\nVmHWM:\t    2000 kB\nRssAnon:\t       5 kB\nThreads:\t9\n"
    assert parse_kilobytes(status) == {"VmHWM": 2_048_000, "RssAnon": 5120}
    with MemoryWatch(lambda: [os.getpid()]) as watch:
        while not watch.peaks():
            pass
    (peak,) = watch.peaks()
    assert peak.rss >= peak.anonymous > 0


def test_only_calls_that_met_an_exchange_count() -> None:
    made = [(0.0, 0.5), (0.75, 0.5), (2.0, 0.125), (3.5, 0.25), (4.5, math.inf), (9.0, 5.0)]
    windows = np.array([[1.0, 2.05], [3.6, 4.0]])
    assert answers_during(made, windows) == Answers(3, p99_ms=500.0, max_ms=500.0)
    assert answers_during([(3.7, math.inf)], windows).max_ms == math.inf
    assert answers_during(made, np.empty((0, 2))).count == 0
    assert answers_during([], windows).count == 0


def test_a_probe_goes_on_when_a_call_fails() -> None:
    calls = iter(range(100))
    fourth = threading.Event()

    def call() -> None:
        number = next(calls)
        if number == 3:
            fourth.set()
        if number == 1:
            raise Unreachable("gone")

    with Probe("status", call) as probe:
        assert fourth.wait(60)
    first, failed, third = (took for _, took in probe.made()[:3])
    assert failed == math.inf
    assert max(first, third) < math.inf


def test_answers_are_judged_by_the_slowest() -> None:
    samples = [
        AnswerSample("shm", "shard GetStatus", Answers(400, 12.0, 199.0)),
        AnswerSample("tcp", "shard GetStatus", Answers(400, 12.0, 201.0)),
        AnswerSample("tcp", "all", miss="not run"),
    ]
    assert answers_table(samples).splitlines()[-3:] == [
        "| shard GetStatus, shared memory | 400 | 12 | 199 | met |",
        "| shard GetStatus, TCP | 400 | 12 | 201 | **missed** |",
        "| all, TCP | – | – | – | not run |",
    ]


@pytest.mark.parametrize("name", ["bench", *sections(1)])
def test_every_table_has_its_place_in_the_readme(name: str) -> None:
    page = README.read_text()
    assert page.index(f"<!-- {name} -->\n") < page.index(f"<!-- /{name} -->")
