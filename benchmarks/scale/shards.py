"""Shards without parameters: they register, watch, begin generations, vouch for pushes and report
snapshots by the real calls, all on one event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.scale.calls import AGAIN_S, CallBook, MemberCalls
from psrpc import SOFTWARE
from psrpc.core.batch import BatchId
from psrpc.core.errors import PsError
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import (
    AppliedEpoch,
    HeldState,
    ShardFigures,
    ShardHeartbeat,
    ShardRegistration,
)
from psrpc.ops.process import incarnation
from psrpc.security.signatures import GRANT_BYTES, receipts_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.shard_reports import to_heartbeat, to_ready, to_registration, to_watch

CONTENT = b"scale"
"""A shard's part of every checkpoint."""


class SimulatedShards:
    """All shards of a job. They hold the same batches, since a simulated push reaches all of them
    at once."""

    def __init__(self, address: str, count: int, book: CallBook) -> None:
        self.count = count
        self.version = 0
        self.initialized = False
        self.key = b""
        """The key that the shards of the present generation vouch with."""
        self.applied: dict[int, IntervalSet] = {}
        """Positions of records by epoch."""
        self._members = [_Shard(self, index, MemberCalls(address, book)) for index in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts all of them."""
        for member in self._members:
            self._tasks += [asyncio.create_task(t) for t in (member.follow(), member.beat())]

    async def stop(self) -> None:
        """Ends all of them, without a word to the coordinator."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            await member.calls.close()

    def push(self, worker: str, generation: int, batch: BatchId, attempt: int) -> tuple[bytes, ...]:
        """Applies a gradient on all shards, once; returns their receipts."""
        done = self.applied.setdefault(batch.epoch, IntervalSet())
        if not done.contains(batch.first, batch.first + batch.count):
            done.add(batch.first, batch.first + batch.count)
            self.version += 1
        receipts = receipts_of(self.key, worker, generation, batch, attempt, self.count, False)
        size = GRANT_BYTES
        return tuple([receipts[at : at + size] for at in range(0, len(receipts), size)])


class _Shard:
    def __init__(self, shards: SimulatedShards, index: int, calls: MemberCalls) -> None:
        self.calls = calls
        self._shards = shards
        self._index = index
        self._incarnation = incarnation()
        self._generation = 0
        self._run_dir = Path()
        self._heartbeat_s = 1.0
        self._revoked = 0
        self._known = False

    async def follow(self) -> None:
        """Registers, and obeys commands; again whenever the connection breaks."""
        while True:
            with suppress(PsError, grpc.RpcError):
                await self._register()
                async for command in self.calls.stub.Watch(to_watch(self._index, self._held())):
                    await self._obey(command)
            self._known = False
            await asyncio.sleep(AGAIN_S)

    async def beat(self) -> None:
        """Sends heartbeats."""
        # Real shards do not start in the same millisecond.
        await asyncio.sleep(self._heartbeat_s * self._index / self._shards.count)
        while True:
            if self._known:
                with suppress(PsError):
                    await self._heartbeat()
            await asyncio.sleep(self._heartbeat_s)

    def _held(self) -> HeldState:
        shards = self._shards
        return HeldState(self._incarnation, self._generation, shards.initialized, shards.version)

    async def _register(self) -> None:
        where = f"127.0.0.1:{20000 + self._index}"
        answer = await self.calls.persist(
            "RegisterShard",
            to_registration(
                ShardRegistration(self._index, self._incarnation, where, "here", 1, SOFTWARE)
            ),
        )
        self._run_dir, self._heartbeat_s = Path(answer.run_dir), answer.heartbeat_s
        self._known = True

    async def _heartbeat(self) -> None:
        shards = self._shards
        figures = ShardFigures(
            version=shards.version, applied=shards.version, generation=self._generation
        )
        beat = ShardHeartbeat(self._index, self._incarnation, figures, revoked=self._revoked)
        await self.calls.call("HeartbeatShard", to_heartbeat(beat))

    async def _obey(self, command: pb.WatchResponse) -> None:
        match command.WhichOneof("command"):
            case "begin":
                await self._begin(command.begin)
            case "snapshot":
                await self._save(command.snapshot)
            case "revocation":
                self._revoked = command.revocation.number
                await self._heartbeat()

    async def _begin(self, begin: pb.Begin) -> None:
        shards = self._shards
        self._generation, self._revoked, shards.key = begin.generation, 0, begin.grant_key
        applied: list[AppliedEpoch] = [
            {"epoch": epoch, "applied": [[a, b] for a, b in positions], "skipped": []}
            for epoch, positions in shards.applied.items()
        ]
        await self.calls.persist("ReportShardReady", to_ready(self._index, self._held(), applied))

    async def _save(self, order: types.SnapshotOrder) -> None:
        name = f"shard-{self._index}.safetensors" if order.write else ""
        if name:
            (self._run_dir / order.directory / name).write_bytes(CONTENT)
        await self.calls.persist(
            "ReportSnapshot",
            pb.ReportSnapshotRequest(
                shard=self._index,
                incarnation=self._incarnation,
                generation=self._generation,
                name=order.name,
                version=self._shards.version,
                file=name,
                nbytes=len(CONTENT) if name else 0,
                sha256=hashlib.sha256(CONTENT).hexdigest() if name else "",
            ),
        )


def intervals(applied: Mapping[int, IntervalSet]) -> int:
    """Counts the intervals of an applied-set, which is what its report costs."""
    return sum(1 for positions in applied.values() for _ in positions)
