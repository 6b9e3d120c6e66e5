"""Places for workers: a flood of registrations costs neither workers that work nor new ones theirs.

All workers of a job have one certificate, so a registration proves nothing but that. A place is
safe once its worker has done work. Until then it is a newcomer's: where newcomers are too many, a
further one gets the place of the one that has shown least life. So a peer that registers a thousand
names and does nothing with them displaces its own; and two hundred workers that start at once fit.

Pure: the membership is the only caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

PER_ADDRESS = 512
"""Newcomers of one address: all of a machine's workers, and twice as many as it may have calls
under way (``psrpc.net.limits.PEER_CALLS``)."""


class Candidate(Protocol):
    """What the rule asks of a worker that is there."""

    address: str
    """Without its port: each connection has another."""
    asked: bool
    """It has asked for work since it registered."""
    worked: bool
    """It has done some."""
    registered: float
    """When it did."""


Place = TypeVar("Place", bound=Candidate)


def gives_way(active: Iterable[Place], address: str, most: int) -> Place | None:
    """The newcomer that leaves its place to one from ``address``; None where nobody has to, since
    there is room, or nobody can, since all ``most`` have done work.

    Of those of an address, or where the whole job is full of the address that has most: one that
    has not asked for work before one that has, and of these the one that registered first.
    """
    workers = list(active)
    newcomers = [worker for worker in workers if not worker.worked]
    held = Counter(worker.address for worker in newcomers)
    if held[address] >= PER_ADDRESS:
        crowd = address
    elif len(workers) >= most and held:
        # Its own, where others have as many.
        crowd = max(held, key=lambda one: (held[one], one == address))
    else:
        return None
    mine = (worker for worker in newcomers if worker.address == crowd)
    return min(mine, key=lambda worker: (worker.asked, worker.registered))
