"""Changes of a job's consistency policy, or of its processes, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from coordinator.core.lifecycle import ENDED, STOPPED_FOR, Phase
from coordinator.core.run import Followed
from coordinator.core.wording import in_words
from coordinator.records.stored_values import CHANGED
from coordinator.records.stored_values import ENDED as ENDED_KEY
from coordinator.training.job_state import JobState
from coordinator.training.training import Training
from coordinator.transitions.stopping import SaveRequest
from psrpc.core.errors import JobFailed, NotReady
from psrpc.core.policy import Policy
from psrpc.ops.logs import get_logger

log = get_logger()


class Changes:
    """Begins a change at a user's request or by the job's rule, and advances it. ``switch`` is the
    one in progress. Not thread-safe."""

    def __init__(
        self,
        job: JobState,
        advance: Callable[[], None],
        waiting_for: Callable[[], str],
        finish: Callable[[str, Phase], None],
    ) -> None:
        """``advance`` moves the job on as far as its state allows; ``waiting_for`` names the event
        that the job waits for; ``finish`` ends it for all processes, for a reason."""
        self._job = job
        self._finish = finish
        self.changed = job.run.changed
        """Settings of the job beside those of its start; at last those to start again with."""
        self._advance = advance
        self._waiting_for = waiting_for
        self.switch: Switch | None = None
        self.described = ""
        """The settings, in words, with which the job is being described anew."""

    def __str__(self) -> str:
        """Describes the change in progress and its stage; empty if there is none."""
        if self.switch is not None:
            return f"{self.switch}: {self.switch.stage}"
        return f"{self.described}: the job is described anew with that" if self.described else ""

    def ask(self, settings: Policy) -> int:
        """Starts a change to another policy for a user; returns the policy's number.

        Raises:
            JobFailed: the job is over, or has nothing more to train.
            NotReady: another change is in progress, or training has not begun.
        """
        job, switch = self._job, self.switch
        if switch is not None and switch.settings == settings and not switch.changed:
            return switch.number
        stands = job.phase not in (*ENDED, "stopping") and settings == job.run.settings
        if switch is None and stands:
            return job.run.policy
        self.check_free("policy")
        number = job.run.policy + 1
        self._start(settings)
        self._advance()
        return number

    def ask_restart(self, changed: Mapping[str, str]) -> None:
        """Starts a change of the settings ``changed``, with which the whole cluster starts again;
        does nothing if that is under way. Raises as :meth:`ask`."""
        if self.switch is not None and self.switch.changed == changed:
            return
        self.check_free("processes")
        run = self._job.run
        self._begin(Switch(run.policy, run.settings, changed=changed))
        self._advance()

    def check_free(self, what: str) -> None:
        """Raises NotReady or JobFailed unless a change, of ``what``, may begin now."""
        job = self._job
        if self.switch is not None:
            raise NotReady(f"{self.switch} is under way ({self.switch.stage}); try again after it")
        if job.phase in ("waiting", "recovering", "initializing"):
            awaited = self._waiting_for() or "training to begin"
            raise NotReady(
                f"the job is {job.phase}: it waits for {awaited}; its {what} can be changed then"
            )
        if job.phase != "training" or job.training.epochs.over:
            why = job.reason or "all its batches are done"
            raise JobFailed(f"the job is {job.phase} ({why}); its {what} cannot be changed")

    def advance(self) -> None:
        """Advances the change. Call it at every change and tick while the job trains."""
        training, rule = self._job.training, self._job.run.rule
        if self.switch is None and rule is not None and training.epochs.rule_due:
            self._start(rule.policy, by_rule=True)
        if self.switch is None and training.epochs.rate_due is not None:
            self._start(self._job.run.settings, by_rule=True, rate=training.epochs.rate_due)
        if self.switch is None:
            return
        followed = self.switch.due(training, self._job.now())
        if followed is not None and self.switch.changed:
            self.changed, self.switch = self.switch.changed, None
            self._finish(f"{STOPPED_FOR}{in_words(self.changed)}", "restarting")
            return
        if followed is None or not self._job.generations.go_over(followed):
            return
        if rule is not None and not self.switch.by_rule:
            self._job.warnings.add(
                f"the job's rule ({rule.policy} after epoch {rule.epoch}) is not followed: its "
                "policy was changed by hand"
            )
        log.info("the policy has changed", to=str(followed), step=followed.step)
        self.switch = None

    def end(self, phase: Phase) -> tuple[str, Any]:
        """Returns key and value of the ledger for a job that has ended in ``phase``. To the next
        coordinator, a run that restarts has not ended."""
        if phase == "restarting":
            return CHANGED, {"settings": dict(self.changed), "pending": True}
        return ENDED_KEY, {"phase": phase, "reason": self._job.reason}

    def begin(self) -> None:
        """Notes that a generation has begun, which restarts the change."""
        if self.switch is not None and self.switch.by_rule:
            # The condition of the rule may have to be reached again.
            self.switch = None
        if self.switch is not None:
            self.switch.begin(self._job.training)

    def drop(self) -> None:
        """Drops the change, since training is over."""
        if self.switch is not None:
            phase = self._job.phase
            why = "all batches are done" if phase == "finishing" else f"the job is {phase}"
            self._job.warnings.add(f"{self.switch} does not come about: {why}")
            self.switch = None

    def _start(self, settings: Policy, by_rule: bool = False, rate: float | None = None) -> None:
        run = self._job.run
        rate = run.followed[-1].rate if rate is None else rate
        self._begin(Switch(run.policy + 1, settings, by_rule, rate))

    def _begin(self, switch: Switch) -> None:
        self.switch = switch
        switch.begin(self._job.training)
        log.info("a change begins", what=str(switch), by_rule=switch.by_rule)


class Switch:
    """A change, from its request until it can be stored. Not thread-safe.

    Its owner calls :meth:`begin` at once and whenever a generation has begun, and :meth:`due` at
    every change and tick while the job trains.
    """

    def __init__(
        self,
        number: int,
        settings: Policy,
        by_rule: bool = False,
        rate: float = 1.0,
        changed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``number`` is that of the new policy; ``by_rule`` means that the job's rule wants it, not
        a user; ``rate`` multiplies the learning rate from then on. With ``changed``, settings of
        the job, the policy stays and the cluster starts again."""
        self.number = number
        self.settings = settings
        self.by_rule = by_rule
        self.rate = rate
        self.changed = changed
        self._save = SaveRequest()
        self._drained = False
        self._saved = False

    def begin(self, training: Training) -> None:
        """Stops leasing. Each new generation repeats this."""
        self._save = SaveRequest()
        self._drained = self._saved = False
        training.drain()

    def due(self, training: Training, now: float) -> Followed | None:
        """Returns the policy to store, once all is finished, saved and evaluated; None before."""
        self._drained = training.drained
        if not self._drained or training.epochs.over:
            return None
        # Shards drop snapshots kept for evaluation when they begin again.
        self._saved = self._save.saved(training, now) and training.orders.evaluations.idle
        if not self._saved:
            return None
        span = training.span
        return Followed(self.number, self.settings, span.step, span.batches, self.rate)

    @property
    def stage(self) -> str:
        """The stage in one word."""
        return "storing" if self._saved else "saving" if self._drained else "draining"

    def waiting_for(self, training: Training) -> str:
        """Names the event that the change waits for."""
        orders, schedule = training.orders, training.schedule
        if self._saved:
            what = "it to be stored"
        elif self._drained:
            waits = (orders.snapshots.waiting_for(), orders.evaluations.waiting_for())
            what = "; ".join(wait for wait in waits if wait) or orders.awaited_commit()
        else:
            what = (schedule.waiting_for() if schedule else "") or "work that is under way"
        return f"{self}: {what}"

    def __str__(self) -> str:
        if self.changed:
            return f"the change to {in_words(self.changed)}"
        words = Followed(self.number, self.settings, rate=self.rate).words
        return f"the change to policy {self.number} ({words})"
