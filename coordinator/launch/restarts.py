"""Which processes of ``coordinator up`` are started again, and when. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from psrpc.core.exit_status import BAD_INPUT

MAX_RESTARTS = 10
"""Restarts of all processes of a job together, unless somebody says otherwise."""

SHORT_S = 10.0
"""A process that ends sooner after it came up may never be of use."""

LOOP = 3
"""Lives in a row that make a crash loop."""

SAME_WORDS_S = 600.0
"""Ends with the same words are one fault over and over, if they are not further apart."""

PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
_SIGKILL = -9


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process, from its end.

    Attributes:
        name: of the process, the same in all its lives.
        status: the exit status; -N when signal N killed it.
        how: the same in words, e.g. "exit status 1".
        lived_s: since it came up, in seconds; 0 when it never did.
        words: the last that it said, structured logs aside; empty if it said nothing.
    """

    name: str
    status: int
    how: str
    lived_s: float
    words: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again ``after_s`` seconds from now; ``reason`` says which restart it is."""

    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again, and why."""

    reason: str


class Restarts:
    """Counts the restarts of a job and sees crash loops. Not thread-safe.

    A process that somebody kills (SIGKILL) tells nothing about the next one, so such an end counts
    against ``limit`` and is no part of a crash loop.
    """

    def __init__(self, limit: int = MAX_RESTARTS) -> None:
        """``limit`` is on all processes together; 0 is never."""
        self._limit = limit
        self._lives: dict[str, deque[Life]] = {}
        self._short: Counter[str] = Counter()
        self._made: Counter[str] = Counter()

    @property
    def made(self) -> dict[str, int]:
        """Restarts so far, by process."""
        return dict(self._made)

    def ended(self, life: Life) -> Restart | GiveUp:
        """What to do after this life; a restart counts from then on."""
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
    """In words; empty when it is none."""
    if len(lives) < LOOP or any(life.status == _SIGKILL for life in lives):
        return ""
    loop = f"a crash loop, it ended {LOOP} times in a row"
    if all(life.lived_s < SHORT_S for life in lives):
        return f"{loop} within {SHORT_S:.0f} s of coming up"
    words = lives[-1].words
    alike = all(life.words == words and life.lived_s < SAME_WORDS_S for life in lives)
    return f"{loop} with the same words" if words and alike else ""


def _pause_s(short: int) -> float:
    """None after a life of some length, or after one short one; then twice as long each time."""
    return 0.0 if short < 2 else min(PAUSE_S * 2 ** (short - 2), LONGEST_PAUSE_S)


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
