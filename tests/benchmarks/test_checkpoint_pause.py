from __future__ import annotations

from benchmarks.checkpoint_pause import Pause, row


def test_the_first_pause_is_judged_beside_the_median_of_later_ones() -> None:
    longest = (260.0, 60.0, 50.0, 90.0)
    pauses = [Pause(ordinary=30.0, longest_before=35.0, longest=ms, written=9e2) for ms in longest]
    assert row("numpy", pauses) == [
        "numpy",
        "30",
        "230",
        "30",
        "60 (≤ 200, **missed**)",
        "200 (≤ 100, **missed**)",
    ]
    assert row("numpy", pauses[1:])[-2:] == ["60 (≤ 200, met)", "-10 (≤ 100, met)"]
