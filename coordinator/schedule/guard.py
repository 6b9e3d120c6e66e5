"""Stops a job that goes wrong without an error: NaN gradients, exploding losses.

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
"""Multiple of the first loss at which the user is warned at once: it may be infinite soon."""

PATIENCE_STEPS = 200
"""Steps in a row above ``FACTOR`` that stop the job."""

WARNED_STEPS = PATIENCE_STEPS // 2
"""Such steps after which the user is warned, in time to change something."""


class Guard:
    """Watches finished batches; each method returns why the job must stop, with an error code, or
    None. Warnings before a stop collect in ``warnings``; the owner takes them out.

    Pure and not thread-safe.
    """

    def __init__(
        self, policy: Policy, first_loss: float | None = None, attended: bool = False
    ) -> None:
        """``first_loss`` is the mean loss of the first window, if an earlier run of the job saw it.
        Advice for an ``attended`` job names no flags, as its attendant uses no command line."""
        self._attended = attended
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
        """Continues under ``policy``. Another policy resets the count of bad steps, as it may cure
        them."""
        if policy != self._policy:
            self._policy = policy
            self._above = 0
            self._exploded = False
            self._stale = False

    def batch(self, batch: BatchId, skipped: bool, staleness: int = 0) -> str | None:
        """Checks a finished batch; ``skipped`` means that its gradient was NaN or infinite."""
        self._stale = self._stale or staleness > 0
        self._skipped = self._skipped + 1 if skipped else 0
        self._learned = self._learned or not skipped
        if self._skipped < SKIPPED_IN_A_ROW:
            return None
        streak = (
            f"PS603: {SKIPPED_IN_A_ROW} batches in a row had a NaN or infinite gradient, the last "
            f"one {batch}"
        )
        if not self._learned:
            # No learning rate has been at work yet, except in local steps.
            return (
                f"{streak}, and no batch before them had another; look for NaN in the data "
                "(np.isfinite(x).all()), or a logarithm of zero in the loss; or "
                f"{self._advice(running=False)}"
            )
        return (
            f"{streak}; {self._advice(running=False)}; or look for NaN in the data or a logarithm "
            "of zero in the loss"
        )

    def step(self, loss: float) -> str | None:
        """Checks the mean loss of a finished step. The mean ignores a NaN loss (of a finite
        gradient)."""
        if math.isnan(loss):
            return None
        self._window.append(loss)
        if len(self._window) < WINDOW_STEPS:
            return None
        mean = self.loss
        if self._first_loss is None and math.isfinite(mean):
            self._first_loss = mean
        first = self._first_loss or 0.0
        # A multiple of a loss that is not positive says nothing; such a job is not guarded.
        if not (first > 0 and mean > FACTOR * first):
            self._above = 0
            return None
        self._above += 1
        exploded = not self._exploded and mean > EXPLODED * first
        self._exploded = self._exploded or exploded
        if self._above == WARNED_STEPS or exploded:
            stops = f"the run is stopped after {PATIENCE_STEPS} such steps; "
            self.warnings.append(
                f"training may be diverging: the loss is {mean / first:.3g} times its first value "
                f"({mean:.4g}, first {first:.4g}), and was above {FACTOR:g} times for "
                f"{self._above} steps; {'' if self._attended else stops}"
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
        """Returns advice for a job that is ``running``, or for its next start."""
        if self._attended:
            return "lower optimizer.learning_rate"
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
