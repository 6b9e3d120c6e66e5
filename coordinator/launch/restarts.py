"""Decides which processes of ``coordinator up`` are started again, and when. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.core.lifecycle import STOPPED
from psrpc.ops.exit_status import BAD_INPUT, FAILED, INTERRUPTED

MAX_RESTARTS = 10
"""Default limit on restarts of all processes of a job together."""

SHORT_S = 10.0
"""A process that ends sooner after it came up counts as short-lived."""

LOOP = 3
"""Number of failed lives in a row that make a crash loop."""

SAME_WORDS_S = 600.0
"""Failed lives that end with the same last words count as one fault repeated, if each is shorter
than this."""

PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
_SIGKILL = -9
_NO_ROOM = "error PS502: "


@dataclass(frozen=True, slots=True)
class Life:
    """One ended life of a process.

    Attributes:
        name: name of the process, the same in all its lives.
        status: the exit status; -N when signal N killed it.
        how: the status in words, e.g. "exit status 1".
        lived_s: seconds since it came up; 0 if it never did.
        words: its last line that is not structured log; empty if there is none.
    """

    name: str
    status: int
    how: str
    lived_s: float
    words: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Starts the process ``after_s`` seconds from now; ``reason`` says which restart it is."""

    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Does not start the process again, for ``reason``."""

    reason: str


class Restarts:
    """Counts the restarts of a job and detects crash loops. Not thread-safe.

    A SIGKILL from outside does not suggest that the restarted process will die, too, so it counts
    against ``limit`` but not as part of a crash loop.
    """

    def __init__(self, limit: int = MAX_RESTARTS) -> None:
        """``limit`` covers all processes together; 0 disables restarts."""
        self._limit = limit
        self._lives: dict[str, deque[Life]] = {}
        self._short: Counter[str] = Counter()
        self._made: Counter[str] = Counter()

    @property
    def made(self) -> dict[str, int]:
        """Restarts so far, by process."""
        return dict(self._made)

    def ended(self, life: Life) -> Restart | GiveUp:
        """Decides whether the process is started again; if so, counts the restart."""
        if life.status == BAD_INPUT:
            return GiveUp("what it was given cannot be used, and would not be the next time")
        if not self._limit:
            return GiveUp("--max-restarts is 0")
        lives = self._lives.setdefault(life.name, deque(maxlen=LOOP))
        lives.append(life)
        self._short[life.name] = self._short[life.name] + 1 if life.lived_s < SHORT_S else 0
        loop = _crash_loop(lives)
        if loop:
            return GiveUp(loop)
        made = self._made.total()
        if made >= self._limit:
            memory = "; memory may have run out" if life.status == _SIGKILL else ""
            restarts = f"all {made} restarts are" if made > 1 else "the one restart is"
            return GiveUp(f"{restarts} used up (--max-restarts){memory}")
        self._made[life.name] += 1
        return Restart(
            _pause_s(self._short[life.name]), f"restart {made + 1} of at most {self._limit}"
        )


def _crash_loop(lives: deque[Life]) -> str:
    """Returns the crash loop in words; empty if there is none."""
    if len(lives) < LOOP or any(life.status == _SIGKILL for life in lives):
        return ""
    loop = f"a crash loop, it ended {LOOP} times in a row"
    if all(life.lived_s < SHORT_S for life in lives):
        return f"{loop} within {SHORT_S:.0f} s of coming up"
    words = lives[-1].words
    alike = all(life.words == words and life.lived_s < SAME_WORDS_S for life in lives)
    return f"{loop} with the same words" if words and alike else ""


def _pause_s(short: int) -> float:
    """Returns 0 after at most one short life in a row, then a pause that doubles each time."""
    return 0.0 if short < 2 else min(PAUSE_S * 2 ** (short - 2), LONGEST_PAUSE_S)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_status: 0 done, 1 failed, 2 bad input, 130 interrupted; 76 for now, all start again.
        reason: one line; empty if the job is done or was refused.
        details: further lines to show of a failure: the user's traceback, the end of a log.
        own: the supervisor ended the job, so the coordinator cannot know the reason. Otherwise the
            coordinator's reason, in its summary, takes precedence over ``reason``.
        restarts: restarts of each process that had any.
    """

    exit_status: int
    reason: str = ""
    details: list[str] = field(default_factory=list)
    own: bool = False
    restarts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def after_stop(cls, status: int, log: Path) -> Outcome:
        """Returns the outcome after a coordinator that was told to stop has ended."""
        if status == 0:
            return cls(0)
        if status == FAILED:
            return cls(FAILED, f"the coordinator failed, see {log}")
        # One that was killed has not told the others; one whose cluster was to start again knows
        # of no stop.
        return cls(INTERRUPTED, STOPPED, own=status != INTERRUPTED)

    @property
    def refused(self) -> bool:
        """Whether the job was refused before it began; ``details`` then are the whole message."""
        return self.exit_status != 0 and not self.reason


def is_refusal(status: int, words: Sequence[str]) -> bool:
    """Whether a coordinator that never served, and ended with these words, would fail again: a
    restart frees no disk space and mends no input."""
    if status == FAILED:
        return any(line.startswith(_NO_ROOM) for line in words[-1:])
    return status == BAD_INPUT
