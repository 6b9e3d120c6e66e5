"""Those who leave a job: what has to be settled before they are gone for good.

Deterministic. A worker's work is given to others once every shard
refuses what that worker sends; a shard may go once what it holds is saved.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.lifecycle import ENDED
from coordinator.core.work import Revocation
from coordinator.membership.fencing import OFTEN, Lapses, Revocations
from coordinator.training.job_state import JobState
from coordinator.transitions.stopping import SaveRequest
from psrpc.ops.logs import get_logger

log = get_logger()


class Departures:
    """Workers that are gone and shards that want to go, in the present generation. Not
    thread-safe."""

    def __init__(self, job: JobState, shards: int, advance: Callable[[], None]) -> None:
        """``advance`` takes the job as far as the facts allow."""
        self._job = job
        self._advance = advance
        self._revocations = Revocations(shards)
        self._lapses = Lapses()
        self._leaving: dict[tuple[int, int], SaveRequest] = {}
        """By shard and incarnation: the checkpoint that it waits for."""
        self._untold: set[tuple[int, int]] = set()
        """Shards and incarnations that wait for the end of a drain."""

    def begin(self) -> None:
        """A generation is formed: whoever was gone before cannot reach it."""
        self._leaving.clear()
        self._revocations.begin()

    def worker_silent(self, name: str) -> None:
        """A worker has fallen silent, and may only stand still."""
        job = self._job
        worker = job.members.workers[name]
        if self._lapses.add(worker.incarnation):
            job.warnings.add(
                f"{name} (pid {worker.pid} on {worker.host}) was taken for gone {OFTEN} times "
                "without finishing a batch: it gives no sign of life for "
                f"{job.members.lease_s:.0f} s at a time, as when its code holds Python's GIL "
                "for so long, or its machine swaps; use smaller batches, or leave the long work to "
                "TensorFlow or NumPy"
            )
        self._revoke(name, lost=True)

    def worker_left(self, name: str) -> None:
        """A worker has said that it goes."""
        self._revoke(name, lost=False)

    def dismiss(self, name: str, reason: str) -> None:
        """A worker is there and cannot go on: it is refused from now on, and registers anew."""
        members = self._job.members
        if members.leave_worker(name):
            log.warning("dismissed", worker=name, why=reason)
            self._revoke(name, lost=True)

    def worker_done(self, name: str) -> None:
        """A worker has done a batch: if it falls silent again and again, then not in vain."""
        worker = self._job.members.workers[name]
        worker.worked = True
        self._lapses.done(worker.incarnation)

    def obeyed(self, shard: int, generation: int, revoked: int) -> None:
        """A shard has obeyed all revocations up to this one."""
        if generation == self._job.run.generation:
            free = self._revocations.obeyed(shard, revoked)
            for worker in free:
                self._release(worker)
            if free:
                self._advance()

    def shard_may_go(self, shard: int, incarnation: int) -> bool:
        """A shard was told to stop; whether it may go: a checkpoint was committed since it first
        said so, or the job is over. It does not wait for ever."""
        job = self._job
        if job.phase == "stopping":
            if job.drained:
                self._untold.discard((shard, incarnation))
                job.bell.ring()
            else:
                self._untold.add((shard, incarnation))
            return job.drained
        if job.phase not in ("training", "finishing"):
            return True
        save = self._leaving.setdefault((shard, incarnation), SaveRequest())
        return save.saved(job.training, job.now())

    @property
    def saving(self) -> bool:
        """Whether the job finishes and saves before it is left: shards that leave, too, are needed
        for as long."""
        return self._job.phase == "stopping" and not self._job.drained

    @property
    def all_told(self) -> bool:
        """Whether every shard that leaves has heard that a drain is over."""
        return not self._untold

    def missed(self, shard: int) -> list[Revocation]:
        """Whom ``shard`` has not said that it refuses."""
        return self._revocations.missed(shard)

    def waiting_for(self) -> str:
        """Which shards have to refuse whom, in words; empty when all do."""
        return self._revocations.waiting_for()

    def _release(self, name: str) -> None:
        """Every shard refuses ``name``: others get what it held."""
        opened = self._job.training.release(name)
        if self._job.initializer == name:
            self._job.initializer = None
        log.info("work is open again", of=name, batches=opened)

    def _revoke(self, name: str, lost: bool) -> None:
        """Others get what it holds once every shard refuses it."""
        job = self._job
        attempts = job.training.revoke(name, lost)
        # One that has never asked for work has none that others could be given, and shards remember
        # each that they refuse.
        if job.complete and job.phase not in ENDED and job.members.workers[name].asked:
            job.streams.send(self._revocations.add(name, attempts))
            log.info("worker revoked", worker=name, batches=len(attempts))
        job.bell.ring()
