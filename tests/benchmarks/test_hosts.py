from __future__ import annotations

import pytest

from benchmarks import hosts
from benchmarks.hosts import CASES, PYTORCH, HostSample, rate_of, table
from benchmarks.peers import Figure


def test_the_table_has_rates_ratios_the_share_of_the_relay_and_what_is_missing() -> None:
    name = CASES[0].name
    text = table(
        [
            HostSample(1, name, "float32", Figure(100.0), 0.2),
            HostSample(1, name, "bfloat16", Figure(50.0), 0.3),
            HostSample(1, name, "int8", Figure(miss="worker died"), 0.1),
            HostSample(1, name, "TF", Figure(200.0), 0.25),
        ]
    )
    assert f"| {name} | 10 | 20 | – | – | – | 5 |" in text
    assert f"| {name} | 2.00× | 4.00× | – | – | – |" in text
    assert f"CPU seconds of the relay a second: {name} 0.10 to 0.30." in text
    assert f"- {name}, int8: worker died" in text
    assert PYTORCH in text


def test_two_workers_make_twice_the_steps_of_one() -> None:
    assert rate_of(10.0, 2) == Figure(5.0, 200.0)


def test_it_is_skipped_and_says_so_where_there_can_be_no_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "why_no_hosts", lambda: "needs root, for network namespaces")
    assert hosts.main([]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "skipped: needs root, for network namespaces\n")
