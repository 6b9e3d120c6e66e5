"""How a running job comes to follow another policy: what is under way is finished, and saved.

See ``docs/design/0009-consistency.md``, "Changing it". Pure.
"""

from __future__ import annotations

from coordinator.core.history import Followed
from coordinator.training.training import Training
from coordinator.transitions.save_request import SaveRequest
from psrpc.core.policy import Policy


class Switch:
    """From the word that the policy is to change until it can be stored. Not thread-safe.

    Its owner calls :meth:`begin` at once and whenever a generation has begun, and :meth:`due` at
    every change and tick while the job trains.
    """

    def __init__(
        self, number: int, settings: Policy, by_rule: bool = False, rate: float = 1.0
    ) -> None:
        """``number`` is the one that the policy will have; ``by_rule`` means that the job's rule
        wants it, and no person; ``rate`` multiplies the learning rate from then on."""
        self.number = number
        self.settings = settings
        self.by_rule = by_rule
        self.rate = rate
        self._save = SaveRequest()
        self._drained = False
        self._saved = False

    def begin(self, training: Training) -> None:
        """Nothing more is leased. In a generation that was formed meanwhile all begins anew."""
        self._save = SaveRequest()
        self._drained = self._saved = False
        training.drain()

    def due(self, training: Training, now: float) -> Followed | None:
        """What has to be stored, once all is finished, saved and evaluated; None before."""
        self._drained = training.drained
        if not self._drained or training.trained:
            return None
        # Shards drop what they keep to be evaluated when they begin again.
        self._saved = self._save.saved(training, now) and training.orders.evaluations.idle
        if not self._saved:
            return None
        span = training.span
        return Followed(self.number, self.settings, span.step, span.batches, self.rate)

    @property
    def stage(self) -> str:
        """In one word."""
        return "storing" if self._saved else "saving" if self._drained else "draining"

    def waiting_for(self, training: Training) -> str:
        """What is waited for, in words."""
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
        words = Followed(self.number, self.settings, rate=self.rate).words
        return f"the change to policy {self.number} ({words})"
