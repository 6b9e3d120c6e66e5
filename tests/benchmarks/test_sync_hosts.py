from __future__ import annotations

import pytest

from benchmarks import hosts, sync_hosts
from benchmarks.peers import Figure
from benchmarks.sync_hosts import MISSING, WAYS, WaySample, table


def test_the_table_has_the_rates_of_all_ways_and_what_is_missing() -> None:
    text = table(
        [
            WaySample(1, "mnist_dnn", "one shard", Figure(100.0)),
            WaySample(2, "mnist_dnn", "one shard", Figure(50.0)),
            WaySample(1, "mnist_dnn", "a slice on each host", Figure(20.0, 51.0)),
            WaySample(1, "mnist_dnn", "TF ring", Figure(miss="worker died")),
        ]
    )
    assert "| mnist_dnn | 15 | – | – | 51 | – | – |" in text
    assert "- mnist_dnn, TF ring: worker died" in text
    assert MISSING in text


def test_a_way_has_shards_or_slices() -> None:
    for way in WAYS.values():
        assert bool(way.shards) != bool(way.slices)
        assert ("dense=allreduce" in way.settings) == bool(way.slices)


def test_it_is_skipped_and_says_so_where_there_can_be_no_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "why_no_hosts", lambda: "needs root, for network namespaces")
    assert sync_hosts.main([]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "skipped: needs root, for network namespaces\n")
