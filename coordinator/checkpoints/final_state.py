"""The final state of a job: saved under one name after another until that succeeds. Pure."""

from __future__ import annotations

from coordinator.checkpoints.cadence import checkpoint_pause_s


class FinalState:
    """The state that training ends with, in one generation. It does not change any more, so one
    that could not be saved is ordered again under another name, after a pause. Not thread-safe."""

    def __init__(self) -> None:
        self.known = False
        """True if it was evaluated already, as the state of an epoch."""
        self.saved = False
        """True once it is on disk (and kept, if it is evaluated)."""
        self.name: str | None = None
        """Of its snapshot, once ordered; None again if that fails."""
        self._refused = ""
        """Why it could not be saved, until it is ordered again."""
        self._tries = 0
        """Failed orders."""
        self._again_at: float | None = None

    @property
    def due(self) -> bool:
        """True if its snapshot may be ordered once training is done."""
        return self.name is None and not self._refused

    def order(self, name: str) -> str:
        """Notes that it is ordered now as ``name``; returns that name, distinct from those of
        failed orders."""
        self.name = f"{name}.r{self._tries}" if self._tries else name
        return self.name

    def taken(self, name: str) -> None:
        """Notes that every shard has the snapshot ``name``, which may be another one."""
        self.saved = self.saved or name == self.name

    def withdrawn(self, name: str) -> None:
        """Undoes the order ``name``, which may be of another snapshot."""
        if name == self.name:
            self.name, self.saved = None, False

    def failed(self, reason: str) -> str:
        """Notes that its snapshot failed; returns a warning the first time, else nothing."""
        name, self.name, self.saved, self._refused = self.name, None, False, reason
        self._tries += 1
        if self._tries > 1:
            return ""
        return (
            f"the final state cannot be saved as {name}: {reason}; the shards "
            "keep it, and it is tried again until it is saved"
        )

    def retry(self, now: float) -> None:
        """Lets a state that could not be saved be ordered again, after a pause. Call it
        periodically."""
        if not self._refused:
            return
        if self._again_at is None:
            self._again_at = now + checkpoint_pause_s(self._tries)
        elif now >= self._again_at:
            self._refused, self._again_at = "", None

    def waiting_for(self) -> str:
        """Says why it is not saved; empty while nothing is wrong with it."""
        if not self._refused:
            return ""
        return (
            f"the final state to be saved: {self._refused}; tried again after "
            f"{checkpoint_pause_s(self._tries):.0f} s"
        )
