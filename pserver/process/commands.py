"""Carries out the coordinator's commands on a shard, and builds the shard's reports.

Uses no thread, clock or connection, so that a simulated cluster runs the same code as a real one.
"""

from __future__ import annotations

from collections.abc import Callable

from pserver.core.requests import Begun, RestoredState
from pserver.engine.engine import ShardEngine
from pserver.wire import messages as wire
from psrpc.core.errors import PsError
from psrpc.ops.logs import get_logger
from psrpc.v1 import coordinator_pb2 as pb

log = get_logger()


def obey(
    engine: ShardEngine, command: pb.WatchResponse, read: Callable[[str], RestoredState]
) -> pb.ReportShardReadyRequest | None:
    """Carries out any ``command`` but ``shutdown``; every command may come more than once.

    After a ``revocation`` the caller sends a heartbeat: the coordinator leases the worker's batches
    to others once all shards report that they refuse the worker.

    Args:
        read: reads this shard's part of a checkpoint, named relative to the run directory; raises
            CheckpointError if it is damaged.

    Returns:
        The report that the coordinator waits for after ``begin``.

    Raises:
        ResourceExhausted: the shard cannot carry out a revocation, and cannot go on.
    """
    match command.WhichOneof("command"):
        case "begin":
            return _begin(engine, command.begin, read)
        case "revocation":
            engine.revoke(wire.from_revocation(command.revocation))
        case "decision" | "snapshot" | "release_snapshot":
            try:
                _follow(engine, command)
            except PsError as error:
                # The coordinator repeats it, a worker brings it, or it is out of date.
                log.warning("a command could not be carried out", reason=str(error))
        case unknown:
            log.warning("unknown command of the coordinator", command=unknown)
    return None


def _follow(engine: ShardEngine, command: pb.WatchResponse) -> None:
    match command.WhichOneof("command"):
        case "decision":
            engine.decide(wire.from_decision(command.decision))
        case "snapshot":
            engine.take_snapshot(wire.from_order(command.snapshot))
        case "release_snapshot":
            engine.release_snapshot(command.release_snapshot)


def _begin(
    engine: ShardEngine, command: pb.Begin, read: Callable[[str], RestoredState]
) -> pb.ReportShardReadyRequest | None:
    """Reads the checkpoint before the engine takes its lock, since reading may take long."""
    try:
        order = wire.from_begin(command)
        # A repeated order needs no file, which may be deleted by now.
        new = order.generation > engine.begun
        begun = engine.begin(order, read(order.restore) if order.restore and new else None)
    except PsError as error:
        log.warning("cannot begin", generation=command.generation, reason=str(error))
        standing = engine.report()
        begun = Begun(command.generation, standing.version, standing.initialized, ())
        return _ready(engine, begun, error=str(error))
    return None if begun is None else _ready(engine, begun)


def _ready(engine: ShardEngine, begun: Begun, error: str = "") -> pb.ReportShardReadyRequest:
    return pb.ReportShardReadyRequest(
        shard=engine.identity.shard,
        incarnation=engine.identity.incarnation,
        generation=begun.generation,
        version=begun.version,
        initialized=begun.initialized,
        applied=wire.to_applied(begun.applied),
        error=error,
    )
