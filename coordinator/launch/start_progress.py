"""Judges a process that has not made its first report by its progress, not by the clock. Pure.

Importing TensorFlow, building a model and compiling it take seconds of CPU, and on a busy machine
minutes of time, during which heartbeats may stay out: a restart would only repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CPU_S = 0.1
"""CPU seconds that count as progress. A process whose work has come to a halt uses less in minutes:
its other threads look at their clocks now and then."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process together with all that it has started.

    Attributes:
        cpu_s: CPU seconds used so far, user and system.
        runnable: whether it waits for a CPU or for a disk, neither of which is its own doing.
        milestone: the last event in its log; empty if it has logged none.
    """

    cpu_s: float
    runnable: bool
    milestone: str = ""


class StartProgress:
    """Follows one process from its start to its first report. Not thread-safe."""

    def __init__(self, now: float) -> None:
        """``now`` is when the process was started, in monotonic seconds."""
        self._moved = now
        self._cpu_s = 0.0
        self._milestone = ""
        self.sampled = False
        """Whether the system tells anything of the process."""

    @property
    def milestone(self) -> str:
        """The last one that the process has reached, in words."""
        return f'"{self._milestone}"' if self._milestone else "its start"

    def look(self, sample: Sample, now: float) -> None:
        """Takes in a sample: progress is CPU time, the wish to run, or another milestone."""
        self.sampled = True
        # What a child process has used vanishes when somebody else waits for its end.
        used_s = abs(sample.cpu_s - self._cpu_s)
        if used_s >= LEAST_CPU_S or sample.runnable or sample.milestone != self._milestone:
            self.moved(now)
            self._cpu_s, self._milestone = sample.cpu_s, sample.milestone

    def moved(self, now: float) -> None:
        """The process has made progress, or nobody can say that it has not."""
        self._moved = now

    def idle_s(self, now: float) -> float:
        """Seconds without progress."""
        return now - self._moved
