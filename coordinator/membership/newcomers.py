"""Assigns places so that floods of registrations displace neither working nor new workers.

All workers of a job have one certificate, so a registration proves nothing else. A place is safe
once its worker has done work. Until then its worker is a newcomer: where newcomers are too many,
another one gets the place of the one that has shown least life. So a peer that registers a thousand
names and does nothing with them displaces its own, while two hundred workers that start at once
fit.

Pure: the membership is the only caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

PER_ADDRESS = 512
"""Newcomers of one address: all of a machine's workers, and twice as many as its concurrent calls
(``psrpc.net.limits.PEER_CALLS``)."""


class Candidate(Protocol):
    """The facts about a present worker that the rule needs."""

    address: str
    """The address without its port, which differs between connections."""
    asked: bool
    """Whether it has asked for work since it registered."""
    worked: bool
    """Whether it has done some."""
    registered: float
    """When it registered."""


Place = TypeVar("Place", bound=Candidate)


def gives_way(active: Iterable[Place], address: str, most: int) -> Place | None:
    """Returns the newcomer that must give way to one from ``address``; None if there is room, or if
    all ``most`` workers have done work.

    Candidates are the newcomers of that address, or of the most common one if the job is full. One
    that has not asked for work goes first, then the one that registered first.
    """
    workers = list(active)
    newcomers = [worker for worker in workers if not worker.worked]
    held = Counter(worker.address for worker in newcomers)
    if held[address] >= PER_ADDRESS:
        crowd = address
    elif len(workers) >= most and held:
        # Prefer its own address among the most common ones.
        crowd = max(held, key=lambda one: (held[one], one == address))
    else:
        return None
    mine = (worker for worker in newcomers if worker.address == crowd)
    return min(mine, key=lambda worker: (worker.asked, worker.registered))
