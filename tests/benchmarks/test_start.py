from __future__ import annotations

import pytest

from benchmarks.start import StartSample, pause_s, table


@pytest.mark.parametrize(
    ("ends", "pause"),
    [
        ([], None),
        ([9.0, 10.0], None),
        # A step that the shard had answered already ends after the kill.
        ([9.0, 10.25, 12.0, 12.5], 2.0),
        # A worker in the place of one that was killed has no older steps.
        ([13.0, 13.25], 3.0),
    ],
)
def test_a_pause_lasts_until_the_step_after_the_longest_wait(
    ends: list[float], pause: float | None
) -> None:
    assert pause_s(ends, killed=10.0) == pause


def test_the_target_of_a_start_is_the_import_of_the_same_run_and_three_seconds() -> None:
    samples = [
        StartSample(1, "import", "numpy", False, 2.0),
        StartSample(1, "import", "keras", False, 9.0),
        StartSample(1, "start", "numpy", True, 4.9),
        StartSample(2, "start", "numpy", True, 5.3),
        StartSample(1, "start", "numpy", False, 9.0),
        StartSample(1, "shard", "numpy", True, 3.5),
        StartSample(1, "worker", "numpy", True, miss="no step within 8 s"),
    ]
    text = table(samples)
    first = "| `coordinator up` to first step, numpy "
    assert f"{first}| 5.1 (4.9 5.3) ≤ 5.0, **missed** | 9.0 (9.0) |" in text
    assert "| shard killed to next step, numpy | 3.5 (3.5) ≤ 3.0, **missed** | – |" in text
    assert "- run 1, worker, numpy, warm: no step within 8 s" in text
