"""A state that has to be saved before something goes on: ordered, and again until it is. Pure."""

from __future__ import annotations

from coordinator.checkpoints.saving import pause_s
from coordinator.training.training import Training


class SaveRequest:
    """A checkpoint of what training has come to, or of what it comes to later, in one generation.
    One that fails is ordered again after a pause, for as long as its owner asks. Not
    thread-safe."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._failures = 0
        self._again_at = 0.0

    def saved(self, training: Training, now: float) -> bool:
        """Whether that state is on the disk; orders it if it is time to. Call it at every change
        and tick, or now and then."""
        if self._number is None:
            if now < self._again_at:
                return False
            self._number = training.request_checkpoint()
        training.order_due()
        if training.is_lost(self._number):
            self._number = None
            self._failures += 1
            self._again_at = now + pause_s(self._failures)
            return False
        return training.is_saved(self._number)
