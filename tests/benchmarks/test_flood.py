"""A run under all attacks at once: it ends, every batch counts once, and memory is bounded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from benchmarks.attacker import KINDS
from benchmarks.cluster import Cluster
from benchmarks.flood import ROOM_MB, Phase, Watch, attacked, met, table
from tests.e2e.cluster import JOBS, Gate

BATCHES = 3 * 62
"""Of the job."""


def phase(attack: str, rate: float, shard_mb: float = 100.0) -> Phase:
    return Phase(attack, rate, shard_mb, 90.0, "9 in 1.0 s" if attack else "")


def test_a_ratio_is_of_the_pauses_around_an_attack() -> None:
    phases = [phase("", 100), phase("tcp", 72), phase("", 80), phase("garbage", 40), phase("", 80)]
    assert "| idle TCP connections: 9 in 1.0 s | 72 | 0.80 | 100 | 90 |" in table(phases)
    turns = [*phases[:3], phase("tcp", 40), phase("", 80), phase("tcp", 76), phase("", 80)]
    assert "| 72 | 0.80 (0.50 to 0.95) | 100 |" in table(turns)
    assert met(turns)
    assert met(phases[:3])
    assert not met(phases)
    grown = phase("", 80, 100.0 + ROOM_MB)
    assert not met([*phases[:2], grown])


@pytest.mark.slow
def test_a_run_ends_under_all_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Gate(tmp_path, epoch=2)) as gate:
        for name, value in gate.environment.items():
            monkeypatch.setenv(name, value)
        with (
            Cluster(JOBS / "gated.py", shards=2, workers=2, transport="tcp") as cluster,
            closing(Watch(cluster)) as watch,
        ):
            assert len(watch.targets("grpc")) == 3
            assert len(watch.targets("garbage")) == 5
            before = watch.memory_mb()
            certs = cluster.run_dir / "certs"

            def begin(kind: str) -> None:
                targets = watch.targets(kind)
                attacks.enter_context(attacked(kind, targets, certs, connections=50, idle=False))

            # At the same time, since one that attacks leaves the next little time to start.
            with ThreadPoolExecutor(len(KINDS)) as threads, ExitStack() as attacks:
                list(threads.map(begin, KINDS))
                # All of them are under way before the last epoch is.
                gate.open()
                during = watch.memory_mb()
                cluster.wait()
            summary = json.loads((cluster.run_dir / "summary.json").read_text())
    assert min(during) > 0
    assert max(during) < max(before) + ROOM_MB
    assert summary["batches"] == BATCHES
