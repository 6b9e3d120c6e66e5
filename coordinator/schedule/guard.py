"""Stops a job that has gone wrong without an error: gradients that are NaN, losses that explode.

Asynchronous divergence is often finite: staleness acts like more momentum (Mitliagkas et al.
2016, "Asynchrony begets Momentum"), so the loss settles on a high plateau instead of becoming NaN.
"""

from __future__ import annotations

import math
from collections import deque

from psrpc.core.batch import BatchId
from psrpc.core.policy import Policy

SKIPPED_IN_A_ROW = 10
WINDOW_STEPS = 20
FACTOR = 3.0
EXPLODED = 30.0
"""Times the first loss: what may be infinite soon is warned of at once."""

PATIENCE_STEPS = 200
"""After so many steps in a row that are too high, the job is stopped."""

WARNED_STEPS = PATIENCE_STEPS // 2
"""After so many a person is warned, who may still change something."""


class Guard:
    """Watches batches as they are done; each method returns why the job must stop, with the code of
    that, or None. What a person should know before it comes to that is in ``warnings``, for the
    owner to take out.

    Pure and not thread-safe.
    """

    def __init__(self, policy: Policy, first_loss: float | None = None) -> None:
        """``first_loss`` is the mean loss of the first window, where an earlier run of the job
        has seen it."""
        self._policy = policy
        self._first_loss = first_loss
        self._window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._skipped = 0
        self._learned = first_loss is not None
        """Whether any gradient was finite."""
        self._above = 0
        self._exploded = False
        self._stale = False
        self.warnings: list[str] = []

    @property
    def first_loss(self) -> float | None:
        """Mean loss of the first window; None until it is full."""
        return self._first_loss

    @property
    def loss(self) -> float:
        """Mean loss of the last window; NaN before the first step."""
        return sum(self._window) / len(self._window) if self._window else math.nan

    def follow(self, policy: Policy) -> None:
        """Training goes on under ``policy``. If that is another one, the count of bad steps starts
        anew: it may be the cure."""
        if policy != self._policy:
            self._policy = policy
            self._above = 0
            self._exploded = False
            self._stale = False

    def batch(self, batch: BatchId, skipped: bool, staleness: int = 0) -> str | None:
        """One batch is done; ``skipped`` when its gradient was NaN or infinite."""
        self._stale = self._stale or staleness > 0
        self._skipped = self._skipped + 1 if skipped else 0
        self._learned = self._learned or not skipped
        if self._skipped < SKIPPED_IN_A_ROW:
            return None
        found = (
            f"PS603: {SKIPPED_IN_A_ROW} batches in a row had a NaN or infinite gradient, the last "
            f"one {batch}"
        )
        if not self._learned:
            # No learning rate has been at work yet, except in local steps.
            return (
                f"{found}, and no batch before them had another; look for NaN in the data "
                "(np.isfinite(x).all()), or a logarithm of zero in the loss; or "
                f"{self._advice(running=False)}"
            )
        return (
            f"{found}; {self._advice(running=False)}; or look for NaN in the data or a logarithm "
            "of zero in the loss"
        )

    def step(self, loss: float) -> str | None:
        """One step is done with this mean loss. A NaN loss (of a gradient that was finite) is
        left out of the mean."""
        if math.isnan(loss):
            return None
        self._window.append(loss)
        if len(self._window) < WINDOW_STEPS:
            return None
        mean = self.loss
        if self._first_loss is None and math.isfinite(mean):
            self._first_loss = mean
        first = self._first_loss or 0.0
        # Three times a loss that is not positive says nothing; such a job is not guarded.
        if not (first > 0 and mean > FACTOR * first):
            self._above = 0
            return None
        self._above += 1
        exploded = not self._exploded and mean > EXPLODED * first
        self._exploded = self._exploded or exploded
        if self._above == WARNED_STEPS or exploded:
            self.warnings.append(
                f"training may be diverging: the loss is {mean / first:.3g} times its first value "
                f"({mean:.4g}, first {first:.4g}), and was above {FACTOR:g} times for "
                f"{self._above} steps; the run is stopped after {PATIENCE_STEPS} such steps; "
                f"{self._advice(running=True)}"
            )
        if self._above < PATIENCE_STEPS:
            return None
        return (
            f"PS604: training diverged: the mean loss of {WINDOW_STEPS} steps stayed above "
            f"{FACTOR:g} times its first value for {PATIENCE_STEPS} steps (now {mean:.4g}, first "
            f"{first:.4g}); {self._advice(running=False)}"
        )

    def _advice(self, running: bool) -> str:
        """What may help: to a job that is ``running``, or when it is started again."""
        change = "coordinator set " if running else "--set "
        lower = "lower the learning rate (--set optimizer.learning_rate=...)"
        if self._policy.rounds or not self._stale:
            return lower
        parts = [lower]
        if self._policy.staleness_lr is None:
            parts.append(f"divide it by 1 + staleness ({change}staleness_lr=inverse)")
        sync = "coordinator set mode=sync replicas=N" if running else "--mode sync --replicas N"
        parts.append(f"train in rounds of N micro-batches ({sync})")
        return f"{', or '.join(parts)}: staleness acts like more momentum"
