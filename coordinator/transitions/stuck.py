"""Workers that cannot go on despite their heartbeats: other workers take over their work.

Deterministic. docs/design/0015-broken-routes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from coordinator.core.figures import stands_still
from coordinator.core.lifecycle import FORMING
from coordinator.core.wording import duration, shards
from coordinator.membership.members import Shard, Worker
from coordinator.training.job_state import JobState
from psrpc.ops.logs import get_logger


@dataclass(frozen=True, slots=True)
class BrokenRoutes:
    """Broken connections between present workers and shards.

    Attributes:
        broken: by worker, the shards that it cannot reach although others can, and since when.
        unreached: the shards that no worker reaches, and since when. That is one fault, of the
            shard or of its network, not of the workers.
    """

    broken: Mapping[str, Mapping[int, float]]
    unreached: Mapping[int, float]

    def lines(self, workers: Mapping[str, Worker], shards: list[Shard], now: float) -> list[str]:
        """Returns a sentence for each shard that no worker reaches, and for each broken route of
        the present ``workers``."""
        lines = [
            f"no worker reaches {shards[shard]} (for {duration(now - since)}); check that machine's"
            " network and firewall, and the address that it gives (--advertise)"
            for shard, since in sorted(self.unreached.items())
        ]
        return lines + [
            f"{name} on {workers[name].host} cannot reach {shards[shard]} (for "
            f"{duration(now - since)}), other workers can; it gets no work until it does"
            for name, cut in sorted(self.broken.items())
            if name in workers
            for shard, since in sorted(cut.items())
        ]


def read_routes(workers: Iterable[Worker], shards: Iterable[Shard]) -> BrokenRoutes:
    """Judges the reports of present workers on present shards. Routes to a shard that is away do
    not count, since the job waits for it anyway."""
    active = [worker for worker in workers if worker.state == "active"]
    broken: dict[str, dict[int, float]] = {}
    unreached: dict[int, float] = {}
    for shard in shards:
        if shard.state != "ready" or not shard.watching:
            continue
        cut = {w.name: w.unreachable[shard.index] for w in active if shard.index in w.unreachable}
        if cut and len(cut) == len(active):
            unreached[shard.index] = min(cut.values())
            continue
        for name, since in cut.items():
            broken.setdefault(name, {})[shard.index] = since
    return BrokenRoutes(broken, unreached)


log = get_logger()

GRACE_S = 2.0
"""Seconds for which a worker must be cut off from a shard that others reach before it is dismissed.
By then a lost connection is open again, a dead shard is known to be dead, and the other routes to a
shard that came back, which heal one by one, are open too."""

_NONE = BrokenRoutes({}, {})


class Stuck:
    """Finds stuck workers and the reasons. Not thread-safe."""

    def __init__(self, job: JobState, dismiss: Callable[[str, str], None]) -> None:
        """``dismiss`` makes shards refuse a worker from now on, for a reason."""
        self._job = job
        self._dismiss = dismiss
        self._routes = _NONE
        self._reasons: dict[str, str] = {}
        self._since: dict[str, float] = {}

    def look(self, now: float) -> None:
        """Judges all workers and hands over the work of stuck ones. Call it periodically, and when
        a worker reports a changed route."""
        job = self._job
        members = job.members
        if not job.complete or job.phase in FORMING or members.places.away:
            # The forming of a generation, or an absent shard, may delay workers now.
            self._routes, reasons = _NONE, {}
            for worker in members.workers.values():
                worker.stood(now)
        else:
            # Reports of an older generation concern shards that may have been replaced.
            workers = members.workers.values()
            known = [w for w in workers if not w.unreachable or job.stands(w.generation)]
            self._routes = read_routes(known, members.places.shards)
            reasons = self._judge(now)
        for name in reasons.keys() - self._reasons.keys():
            log.warning("stuck", worker=name, why=reasons[name])
        for name in self._reasons.keys() - reasons.keys():
            log.info("no longer stuck", worker=name)
        changed = reasons.keys() != self._reasons.keys()
        self._reasons = reasons
        self._since = {name: self._since.get(name, now) for name in reasons}
        self._hand_over(now)
        if changed:
            job.bell.ring()

    def why_no_lease(self, worker: str) -> str:
        """Names the event before which ``worker`` gets no work, continuing "waiting for"; empty if
        it may have some."""
        known = self._job.members.workers.get(worker)
        if known is None or not known.unreachable:
            return ""
        return f"{worker} to reach {shards(sorted(known.unreachable))}"

    def broken(self, worker: str) -> dict[int, float]:
        """Returns the shards that other workers reach and ``worker`` does not, and since when."""
        return dict(self._routes.broken.get(worker, {}))

    def lines(self, now: float) -> list[str]:
        """Says which workers are stuck and why, after the shards that no worker reaches."""
        members = self._job.members
        # A worker that has left since the last look is no longer stuck, and may be forgotten.
        there = {name: w for name, w in members.workers.items() if w.state == "active"}
        lines = self._routes.lines(there, members.places.shards, now)
        return lines + [
            f"{name} on {there[name].host} {why}"
            for name, why in sorted(self._reasons.items())
            if name in there and name not in self._routes.broken
        ]

    def waiting_for(self) -> str:
        """Says which shards no worker reaches; empty when there are none."""
        shards = self._job.members.places.shards
        return "; ".join(
            f"a worker to reach {shards[shard]}" for shard in sorted(self._routes.unreached)
        )

    def _judge(self, now: float) -> dict[str, str]:
        reasons = {}
        for worker in self._job.members.workers.values():
            if worker.state != "active":
                continue
            if worker.unreachable:
                # The worker waits for a route, and reports this itself.
                worker.stood(now)
                cut = self._routes.broken.get(worker.name)
                if cut:
                    reasons[worker.name] = f"cannot reach {shards(sorted(cut))}"
                continue
            why = stands_still(worker.position, now)
            if why:
                reasons[worker.name] = why
        return reasons

    def _hand_over(self, now: float) -> None:
        """Opens the work of stuck workers to others; a worker that shards must refuse first is
        dismissed, and registers under another name."""
        job, reasons = self._job, self._reasons
        schedule = job.training.schedule
        if schedule is None or not job.complete:
            return
        for name in reasons:
            # An evaluation changes nothing on a shard.
            job.training.orders.evaluations.release(name)
        to_dismiss = set(schedule.hand_over(reasons.keys()))
        if job.phase == "initializing":
            to_dismiss |= reasons.keys() & {job.initializer}
        workers = [w for w in job.members.workers.values() if w.state == "active"]
        if all(w.name in reasons or w.unreachable for w in workers):
            # No worker could take over, and the fault is not with one worker.
            return
        for name in sorted(to_dismiss):
            if name not in self._routes.broken or now - self._since[name] >= GRACE_S:
                self._dismiss(name, reasons[name])
