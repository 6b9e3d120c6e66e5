"""Carries out the coordinator's commands on a shard, and builds the shard's reports.

Uses no thread, clock or connection, so that a simulated cluster runs the same code as a real one.
"""

from __future__ import annotations

from collections.abc import Callable

from pserver.core.requests import Begun, RestoredState
from pserver.engine.engine import ShardEngine
from psrpc.core.commands import (
    AwaitedWorkers,
    Command,
    Decision,
    Release,
    RoundsAhead,
    SnapshotOrder,
)
from psrpc.core.errors import PsError
from psrpc.core.shard_reports import HeldState
from psrpc.ops.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_begin, from_command, from_revocation
from psrpc.wire.shard_reports import to_ready

log = get_logger()


def obey(
    engine: ShardEngine, message: pb.WatchResponse, read: Callable[[str], RestoredState]
) -> pb.ReportShardReadyRequest | None:
    """Carries out any command except ``shutdown``; every command may arrive more than once.

    After a ``revocation`` the caller must send a heartbeat, because the coordinator leases the
    worker's batches to others only when all shards report that they refuse the worker.

    Args:
        read: reads this shard's part of a checkpoint, whose name is relative to the run directory.
            Raises CheckpointError if it is damaged.

    Returns:
        The report that the coordinator waits for after ``begin``; None after other commands.

    Raises:
        ResourceExhausted: the shard cannot carry out a revocation, and cannot go on.
    """
    match message.WhichOneof("command"):
        case "begin":
            return _begin(engine, message.begin, read)
        case "revocation":
            engine.commands.revoke(from_revocation(message.revocation))
        case _:
            try:
                _follow(engine, from_command(message))
            except PsError as error:
                # No harm: the coordinator repeats the command, a worker brings it too, or it is out
                # of date.
                log.warning("a command could not be carried out", reason=str(error))
    return None


def _follow(engine: ShardEngine, command: Command | None) -> None:
    match command:
        case Decision():
            engine.commands.decide(command)
        case RoundsAhead():
            engine.commands.plan(command)
        case AwaitedWorkers():
            engine.commands.await_workers(command)
        case SnapshotOrder():
            engine.commands.take_snapshot(command)
        case Release():
            engine.commands.release_snapshot(command.name)
        case unknown:
            log.warning("unknown command of the coordinator", command=unknown)


def _begin(
    engine: ShardEngine, message: pb.Begin, read: Callable[[str], RestoredState]
) -> pb.ReportShardReadyRequest | None:
    """Reads the checkpoint before the engine takes its lock, since reading may take long."""
    try:
        order = from_begin(message)
        # Does not read the checkpoint again for a repeated order, since its files may be deleted by
        # now.
        new = order.generation > engine.commands.begun
        begun = engine.commands.begin(order, read(order.restore) if order.restore and new else None)
    except PsError as error:
        log.warning("cannot begin", generation=message.generation, reason=str(error))
        standing = engine.report()
        begun = Begun(message.generation, standing.version, standing.initialized, ())
        return _ready(engine, begun, error=str(error))
    return None if begun is None else _ready(engine, begun)


def _ready(engine: ShardEngine, begun: Begun, error: str = "") -> pb.ReportShardReadyRequest:
    incarnation = engine.identity.incarnation
    held = HeldState(incarnation, begun.generation, begun.initialized, begun.version)
    return to_ready(engine.identity.shard, held, begun.applied, error)
