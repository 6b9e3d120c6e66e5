"""The policies that a run has followed, and the global step by them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psrpc.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy that a run came to follow, with the global step and the batches done by then.
    ``rate`` multiplies the learning rate."""

    number: int
    settings: Policy
    step: int = 0
    batches: int = 0
    rate: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of :meth:`from_json`."""
        return {
            "number": self.number,
            "settings": self.settings.to_json(),
            "step": self.step,
            "batches": self.batches,
            **({} if self.rate == 1.0 else {"rate": self.rate}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Followed:
        """As it was stored."""
        settings = Policy.from_json(document["settings"])
        rate = document.get("rate", 1.0)
        return Followed(document["number"], settings, document["step"], document["batches"], rate)

    @property
    def words(self) -> str:
        """The settings, and the learning rate if that is another."""
        return f"{self.settings}" + (f" learning rate x {self.rate:g}" if self.rate != 1.0 else "")

    def __str__(self) -> str:
        return f"policy {self.number} ({self.words})"


def updates(settings: Policy, first: int, last: int, per_epoch: int) -> int:
    """Global steps that turn ``first`` batches done into ``last``, in order, with ``per_epoch`` of
    them in an epoch: rounds never cross an epoch."""
    if first >= last:
        return 0
    taken = settings.taken
    (epoch, before), (last_epoch, after) = divmod(first, per_epoch), divmod(last, per_epoch)
    if epoch == last_epoch:
        return -(-(after - before) // taken)
    whole = (last_epoch - epoch - 1) * -(-per_epoch // taken)
    return -(-(per_epoch - before) // taken) + whole + -(-after // taken)


def global_step(followed: Sequence[Followed], batches: int, per_epoch: int) -> int:
    """The global step of so many batches done: a round, or a batch without rounds.

    In a history that fell back behind a change it goes by the policy that stood then.

    Args:
        followed: oldest first, beginning with the policy that stood at no batches.
        per_epoch: batches of an epoch.
    """
    index = max(i for i, one in enumerate(followed) if one.batches <= batches)
    one = followed[index]
    step = one.step + updates(one.settings, one.batches, batches, per_epoch)
    return min([step, *(later.step for later in followed[index + 1 :])])
