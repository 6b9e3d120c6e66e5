"""The sessions of workers: opened by a registration, ended by a departure or a revocation.

Everything runs on one event loop and nothing awaits between reading and changing state, so there is
no lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

from coordinator.core.figures import WorkerRegistration
from coordinator.core.work import Report
from coordinator.job.authority import Authority, check_job, check_software
from coordinator.job.job_run import JobRun
from coordinator.membership.members import Worker
from coordinator.records.store import Store
from coordinator.records.stored_values import BARRED
from psrpc.core.errors import AccessDenied, InvalidArgument
from psrpc.ops.logs import get_logger

log = get_logger()


class WorkerSessions:
    """Opens and ends the sessions of workers on one run of a job. Every method runs on one event
    loop."""

    def __init__(self, job_run: JobRun, store: Store, authority: Authority) -> None:
        """``authority`` signs the sessions; ``store`` keeps barred processes."""
        self._job_run = job_run
        self._members = job_run.members
        self._store = store
        self._authority = authority

    def register(self, caller: WorkerRegistration) -> Worker:
        """Gives a worker an id and a session. Raises JobMismatch, AccessDenied (its process is
        barred) or ResourceExhausted (workers that have done work hold all places)."""
        incarnation, host, pid, device = caller.incarnation, caller.host, caller.pid, caller.device
        certificate, secret, address = caller.certificate, caller.secret, caller.address
        who = f"the worker with pid {pid} on {host}"
        check_software(who, caller.software)
        check_job(self._job_run.run, who, caller.job_sha256, caller.settings_sha256)
        again = self._members.active_worker(incarnation, certificate, secret)
        if again is not None and self._job_run.holds_attempt(again.name):
            # The worker dropped a gradient that some shards may have staged. The next gradient may
            # differ in bits, so it must be another attempt.
            self.leave(again.name, "it joins anew", fatal=False)
        displaced = self._members.displaced_by(incarnation, address, certificate, secret)
        if displaced is not None:
            crowd = f"{displaced.address or 'its address'} has registered too many that do not work"
            self._job_run.departures.dismiss(displaced.name, crowd)
        known = set(self._members.workers)
        worker = self._members.register_worker(
            incarnation, host, pid, device, self._job_run.now(), certificate, secret, address
        )
        worker.hosts = caller.hosts
        if self._job_run.run.description.hosted and not caller.hosts:
            self._job_run.warnings.add(
                f"{worker.name} on {host} cannot host a slice: it has no certificate of a shard; "
                "put shard.crt and shard.key beside its worker.crt"
            )
        if worker.name not in known:
            self._members.opened(worker, self._authority.open_session(worker.name, certificate))
            if not worker.stored:
                # Stored names are not stored again: a thousand workers come back to a restarted
                # coordinator at once, and a transaction takes milliseconds.
                self._job_run.note_process("worker", worker.name, incarnation, host)
            log.info(
                "worker registered",
                worker=worker.name,
                host=host,
                pid=pid,
                device=device,
                certificate=certificate or None,
            )
            self._job_run.bell.ring()
        return worker

    def vouched(self, name: str, generation: int, reports: Sequence[Report]) -> list[Report]:
        """Returns a worker's reports with the outcomes that the shards' receipts prove. Bars and
        dismisses a worker that reports a batch without proof that it pushed it. Leaves reports of a
        past generation unchecked: they do not count.

        Raises:
            AccessDenied: a receipt is missing or wrong.
        """
        if not name or not self._job_run.stands(generation):
            return list(reports)
        shards = self._job_run.run.plan.shards
        try:
            return [self._authority.vouched(name, generation, one, shards) for one in reports]
        except AccessDenied as error:
            self._job_run.warnings.add(str(error))
            self._bar(self._members.workers[name])
            self._job_run.departures.dismiss(name, str(error))
            raise

    def revoke(self, name: str, incarnation: int, reason: str, bar: bool) -> None:
        """Ends a worker's session for an operator; with ``bar`` its process may not register again.
        Raises InvalidArgument for a worker that this job does not have."""
        worker = self._members.workers.get(name)
        if worker is None:
            raise InvalidArgument(
                f"there is no worker {name!r}; `coordinator status` lists those of the job"
            )
        if incarnation not in (0, worker.incarnation):
            return
        if bar:
            self._bar(worker)
        self._job_run.departures.dismiss(name, reason or "revoked by an operator")

    def certificates_revoked(self, serials: Collection[str]) -> None:
        """Ends the sessions of the workers that called with these revoked certificates."""
        for worker in list(self._members.workers.values()):
            if worker.state == "active" and worker.serial in serials:
                why = f"its certificate {worker.certificate} was revoked"
                self._job_run.departures.dismiss(worker.name, why)

    def leave(self, name: str, reason: str, fatal: bool) -> None:
        """Removes a worker that leaves. With ``fatal`` the job fails with ``reason``."""
        if self._members.leave_worker(name):
            log.info("worker left", worker=name, why=reason)
            if fatal:
                self._job_run.fail(reason or f"{name} failed and gave no reason")
            self._job_run.departures.worker_left(name)

    def _bar(self, worker: Worker) -> None:
        self._members.bar(worker)
        try:
            self._store.put(BARRED, self._members.barred)
        except sqlite3.Error as error:
            self._job_run.warnings.add(
                f"{worker.name} is barred for as long as this coordinator runs; that cannot be "
                f"stored for the next one: {error}"
            )
