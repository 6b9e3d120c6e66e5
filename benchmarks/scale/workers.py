"""Workers without tensors: the decisions of the real ones (:mod:`worker.protocol`), real calls of
the coordinator, and a sleep in place of gradient and exchange, many on one event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress

from benchmarks.scale.calls import AGAIN_S, CallBook, MemberCalls
from benchmarks.scale.shards import SimulatedShards
from psrpc.core.errors import JobFailed, NotReady, PsError
from psrpc.ops.process import incarnation
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from worker.protocol import actions as does
from worker.protocol.conduct import conduct
from worker.protocol.done import Stopped
from worker.protocol.membership import WorkerMembership


class SimulatedWorker:
    """One worker; :meth:`run` is its life. ``batches`` counts those that it has computed."""

    def __init__(
        self, address: str, shards: SimulatedShards, job: pb.GetJobResponse, book: CallBook
    ) -> None:
        self.batches = 0
        self.batch_s = 1.0
        """Seconds that a batch takes."""
        self._calls = MemberCalls(address, book)
        self._book = book
        self._shards = shards
        self._job = job
        self._incarnation = incarnation()
        self._membership = WorkerMembership(self._incarnation, secrets.token_bytes(SECRET_BYTES))
        self._membership.settings_sha256 = job.settings_sha256
        self._ahead: asyncio.Task[pb.Lease] | None = None

    async def run(self) -> None:
        """Takes part until the job ends."""
        beating = asyncio.create_task(self._beat())
        actions = conduct()
        try:
            action = next(actions)
            while True:
                try:
                    answer = await self._perform(action)
                except (PsError, Stopped) as error:
                    action = actions.throw(error)
                else:
                    action = actions.send(answer)
        except (JobFailed, Stopped):
            pass
        finally:
            beating.cancel()
            if self._ahead is not None:
                self._ahead.cancel()
            await self._calls.close()

    async def _perform(self, action: does.Action) -> object:
        membership = self._membership
        match action:
            case does.Compute():
                await asyncio.sleep(self.batch_s)
                membership.check()
                return does.Computed(1.0, True)
            case does.PushPull(batch=batch, attempt=attempt):
                self.batches += 1
                receipts = self._shards.push(
                    membership.worker, membership.generation, batch, attempt
                )
                return does.Pushed(receipts=receipts)
            case does.Done(batch=done):
                membership.done(done)
            case does.Lease(after=after):
                if after:
                    await asyncio.sleep(AGAIN_S)
                return await self._lease()
            case does.LeaseAhead():
                self._ahead = asyncio.create_task(self._lease())
            case does.TakeLease():
                assert self._ahead is not None  # LeaseAhead came before
                return await self._ahead
            case does.Register():
                await self._register()
            case does.Join():
                await self._join()
            case does.Rejoin():
                await self._drop()
            case does.Initialize():
                self._shards.initialized = True
                return pb.InitializeDone()
            case does.ReportWork(done=work):
                await self._calls.persist("ReportWork", membership.report(work))
            case does.Leave():
                with suppress(PsError):
                    await self._calls.call("LeaveWorker", membership.leave(action.reason))
        return None

    async def _register(self) -> None:
        request = self._membership.register(
            "here", self._incarnation % 2**31, self._job.job_sha256, "cpu"
        )
        self._membership.registered(await self._calls.persist("RegisterWorker", request))

    async def _join(self) -> None:
        request = self._membership.get_cluster()
        while True:
            with suppress(NotReady):
                self._membership.joined(await self._calls.call("GetCluster", request))
                return
            await asyncio.sleep(AGAIN_S)
            self._membership.check()

    async def _lease(self) -> pb.Lease:
        asked = self._membership.lease()
        lease: pb.Lease = (await self._calls.persist("LeaseWork", asked.request)).lease
        self._membership.leased(asked, lease)
        if self._book.leased is None and lease.HasField("train"):
            self._book.leased = time.monotonic()
        return lease

    async def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        self._membership.rejoins()
        await asyncio.sleep(AGAIN_S)

    async def _beat(self) -> None:
        membership = self._membership
        # Real workers do not start in the same millisecond.
        await asyncio.sleep(secrets.randbelow(1000) / 1000)
        while True:
            beat = membership.beat("", pb.WorkerTimes(), {}, None)
            if beat is not None:
                with suppress(PsError):
                    heard = await self._calls.call("HeartbeatWorker", beat.request)
                    membership.heard(beat, heard)
            await asyncio.sleep(membership.heartbeat_s)
