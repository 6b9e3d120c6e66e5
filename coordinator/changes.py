"""The changes of a job's consistency policy, one at a time: who may ask, and how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.lifecycle import ENDED
from coordinator.switching import Switch
from psrpc.errors import JobFailed, NotReady
from psrpc.logs import get_logger
from psrpc.policy import Policy

if TYPE_CHECKING:
    from coordinator.course import Course

log = get_logger()


class Changes:
    """Begins a change when a person or the job's rule wants one, and takes it as far as it comes.
    ``switch`` is the one that is under way. Not thread-safe."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.switch: Switch | None = None

    def __str__(self) -> str:
        """The change that is under way and how far it is; empty if none is."""
        return f"{self.switch}: {self.switch.stage}" if self.switch is not None else ""

    def ask(self, settings: Policy) -> int:
        """A person wants the job to follow another policy; the number that it will have.

        Raises:
            JobFailed: the job is over, or has nothing more to train.
            NotReady: another change is under way, or nobody trains yet.
        """
        course = self._course
        if self.switch is not None:
            if self.switch.settings == settings:
                return self.switch.number
            raise NotReady(f"{self.switch} is under way ({self.switch.stage}); try again after it")
        if course.phase not in (*ENDED, "stopping") and settings == course.run.settings:
            return course.run.policy
        if course.phase in ("waiting", "recovering", "initializing"):
            awaited = course.waiting_for() or "training to begin"
            raise NotReady(
                f"the job is {course.phase}: it waits for {awaited}; its policy can be changed then"
            )
        if course.phase != "training" or course.training.trained:
            why = course.reason or "all its batches are done"
            raise JobFailed(f"the job is {course.phase} ({why}); its policy cannot be changed")
        number = course.run.policy + 1
        self._start(settings)
        course.advance()
        return number

    def advance(self) -> None:
        """Call it at every change and tick while the job trains."""
        training, rule = self._course.training, self._course.run.rule
        if self.switch is None and rule is not None and training.rule_due:
            self._start(rule.policy, by_rule=True)
        if self.switch is None and training.rate_due is not None:
            self._start(self._course.run.settings, by_rule=True, rate=training.rate_due)
        if self.switch is None:
            return
        followed = self.switch.due(training, self._course.now())
        if followed is None or not self._course.generations.go_over(followed):
            return
        if rule is not None and not self.switch.by_rule:
            self._course.warnings.add(
                f"the job's rule ({rule.policy} after epoch {rule.epoch}) is not followed: its "
                "policy was changed by hand"
            )
        log.info("the policy has changed", to=str(followed), step=followed.step)
        self.switch = None

    def begin(self) -> None:
        """A generation has begun while the policy was to change."""
        if self.switch is not None and self.switch.by_rule:
            # What is to be done before it may have to be done again.
            self.switch = None
        if self.switch is not None:
            self.switch.begin(self._course.training)

    def drop(self) -> None:
        """Nothing more is trained."""
        if self.switch is not None:
            phase = self._course.phase
            why = "all batches are done" if phase == "finishing" else f"the job is {phase}"
            self._course.warnings.add(f"{self.switch} does not come about: {why}")
            self.switch = None

    def _start(self, settings: Policy, by_rule: bool = False, rate: float | None = None) -> None:
        run = self._course.run
        rate = run.followed[-1].rate if rate is None else rate
        self.switch = Switch(run.policy + 1, settings, by_rule, rate)
        self.switch.begin(self._course.training)
        log.info("the policy is to change", to=str(settings), by_rule=by_rule)
