from __future__ import annotations

import pytest

from coordinator.launch.process_health import LEAST_CPU_S, Sample, StartProgress


@pytest.fixture
def progress() -> StartProgress:
    found = StartProgress(0.0)
    found.look(Sample(2.0, runnable=False, milestone="listening port=1"), 1.0)
    return found


def test_cpu_time_is_progress(progress: StartProgress) -> None:
    assert progress.sampled
    progress.look(Sample(2.0 + LEAST_CPU_S, False, "listening port=1"), 10.0)
    assert progress.idle_s(15.0) == 5.0


def test_cpu_time_adds_up_from_sample_to_sample(progress: StartProgress) -> None:
    """A process that gets hardly any of a busy machine."""
    for second in range(2, 32):
        used_s = LEAST_CPU_S * second / 4
        progress.look(Sample(2.0 + used_s, False, "listening port=1"), second)
        assert progress.idle_s(second) < 6


def test_a_thread_that_only_looks_at_its_clock_is_no_progress(progress: StartProgress) -> None:
    for second in range(2, 32):
        progress.look(Sample(2.0 + second * LEAST_CPU_S / 50, False, "listening port=1"), second)
    assert progress.idle_s(31.0) == 30.0


def test_a_process_that_waits_for_a_cpu_or_a_disk_is_held_up_by_others(
    progress: StartProgress,
) -> None:
    progress.look(Sample(2.0, True, "listening port=1"), 60.0)
    assert progress.idle_s(61.0) == 1.0


def test_another_milestone_is_progress(progress: StartProgress) -> None:
    assert progress.milestone == '"listening port=1"'
    progress.look(Sample(2.0, False, "registered"), 60.0)
    assert (progress.idle_s(61.0), progress.milestone) == (1.0, '"registered"')


def test_a_process_that_never_spoke_has_started() -> None:
    progress = StartProgress(5.0)
    assert not progress.sampled
    assert (progress.milestone, progress.idle_s(8.0)) == ("its start", 3.0)
