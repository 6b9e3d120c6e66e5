"""How a job ended, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_status: 0 done, 1 failed, 2 bad input, 130 interrupted.
        reason: one line; empty when the job is done, or was refused.
        details: what else to show of a failure: the user's traceback, the last lines of a log.
        own: the supervisor ended the job, so the coordinator cannot know the reason. Otherwise
            the coordinator's own word, in its summary, comes before ``reason``.
        restarts: how often each process was started again; those that never were are left out.
    """

    exit_status: int
    reason: str = ""
    details: list[str] = field(default_factory=list)
    own: bool = False
    restarts: dict[str, int] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether the job was refused before it began; ``details`` are all that is to be said."""
        return self.exit_status != 0 and not self.reason
