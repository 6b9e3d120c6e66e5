"""Handles departures of workers and shards from a job.

Deterministic. Other workers get a worker's work once every shard refuses that worker; a shard may
go once its state is saved.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.lifecycle import ENDED
from coordinator.membership.fencing import OFTEN, FencingOrders, FlapDetector
from coordinator.training.job_state import JobState
from coordinator.transitions.stopping import SaveRequest
from psrpc.core.commands import Revocation
from psrpc.ops.logs import get_logger

log = get_logger()


class Departures:
    """Departed workers and leaving shards of the present generation. Not thread-safe."""

    def __init__(self, job: JobState, shards: int, advance: Callable[[], None]) -> None:
        """``advance`` moves the job on as far as its state allows."""
        self._job = job
        self._advance = advance
        self._revocations = FencingOrders(shards)
        self._lapses = FlapDetector()
        self._leaving: dict[tuple[int, int], SaveRequest] = {}
        """By shard and incarnation: the checkpoint that it waits for."""
        self._holds = False
        """Whether the generation ends once every shard refuses the revoked workers."""
        self._untold: set[tuple[int, int]] = set()
        """Shards and incarnations that wait for the end of a drain."""

    def begin(self) -> None:
        """Begins a generation without revocations: its number alone refuses workers that left
        before."""
        self._leaving.clear()
        self._revocations.begin()
        self._holds = False

    def worker_silent(self, name: str) -> None:
        """Revokes a worker that has fallen silent: it may only be suspended, and come back."""
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
        """Revokes a worker that has announced its departure."""
        self._revoke(name, lost=False)

    def dismiss(self, name: str, reason: str) -> None:
        """Revokes a present worker that cannot go on; its process registers under another name."""
        members = self._job.members
        if members.leave_worker(name):
            log.warning("dismissed", worker=name, why=reason)
            self._revoke(name, lost=True)

    def worker_done(self, name: str) -> None:
        """Notes that a worker has done a batch, which clears its earlier lapses."""
        worker = self._job.members.workers[name]
        worker.worked = True
        self._lapses.done(worker.incarnation)

    def obeyed(self, shard: int, generation: int, revoked: int) -> None:
        """Notes that a shard has obeyed all revocations up to number ``revoked``."""
        if generation == self._job.run.generation:
            free = self._revocations.obeyed(shard, revoked)
            for worker in free:
                self._release(worker)
            settled = self._job.complete and not self._revocations.waiting_for()
            if free and self._holds and settled:
                self._begin_again()
            if free:
                self._advance()

    def shard_may_go(self, shard: int, incarnation: int) -> bool:
        """Whether a shard that was told to stop may go: a checkpoint was committed since its first
        request, or the job is over. The shard does not wait for ever."""
        job = self._job
        if job.generations.again:
            return False
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
        """Whether the job still finishes and saves before it ends, which needs all shards."""
        return self._job.phase == "stopping" and not self._job.drained

    @property
    def all_told(self) -> bool:
        """Whether every leaving shard has heard that a drain is over."""
        return not self._untold

    def missed(self, shard: int) -> list[Revocation]:
        """Returns the revocations that ``shard`` has not confirmed."""
        return self._revocations.missed(shard)

    def waiting_for(self) -> str:
        """Says which shards have to refuse which workers; empty when all do."""
        return self._revocations.waiting_for()

    def _begin_again(self) -> None:
        """Has another generation formed of the shards in their present state. They have dropped the
        rounds that were decided ahead, so their versions no longer rise."""
        log.info("another generation begins: rounds were decided ahead for a worker that left")
        shards = self._job.members.places.shards
        self._job.generations.begin_again([shard.figures.version for shard in shards])

    def _release(self, name: str) -> None:
        """Opens the work of ``name``, which every shard refuses, to other workers."""
        opened = self._job.training.release(name)
        if self._job.initializer == name:
            self._job.initializer = None
        log.info("work is open again", of=name, batches=opened)

    def _revoke(self, name: str, lost: bool) -> None:
        """Revokes a worker; other workers get its work once every shard refuses it."""
        job = self._job
        holds = job.complete and job.phase not in ENDED and job.training.hold(name)
        self._holds = self._holds or holds
        job.generations.again = job.generations.again or holds
        attempts = job.training.revoke(name, lost)
        # A worker that never asked for work holds none, and shards remember each refused worker.
        if job.complete and job.phase not in ENDED and job.members.workers[name].asked:
            # A shard drops a revoked worker's attempts, but with rounds decided ahead it may need
            # them for a round that another shard has applied.
            dropped = () if holds else attempts
            job.streams.send(self._revocations.add(name, dropped, ends_ahead=holds))
            log.info("worker revoked", worker=name, batches=len(attempts))
        job.bell.ring()
