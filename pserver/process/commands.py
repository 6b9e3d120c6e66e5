"""What a shard does with a command of its coordinator, and what it has to say then.

Without a thread, a clock or a connection, so that a simulated cluster obeys as a real one does.
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
    """Carries ``command`` out, any but ``shutdown``; every command may come more than once.

    After a ``revocation`` a heartbeat is due: the worker's batches are leased to others once all
    shards have said that they refuse it.

    Args:
        read: reads this shard's part of a checkpoint, named relative to the run directory; raises
            CheckpointError when it is not good.

    Returns:
        What the coordinator waits for after ``begin``.

    Raises:
        ResourceExhausted: a revocation cannot be obeyed; this shard cannot go on.
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
                # The coordinator repeats it, or a worker brings it, or it is of another time.
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
    """The checkpoint is read before the engine's lock is taken: that may take long."""
    try:
        order = wire.from_begin(command)
        # An order of before needs no file, which may have been deleted since.
        new = order.generation > engine.begun
        begun = engine.begin(order, read(order.restore) if order.restore and new else None)
    except PsError as error:
        log.warning("cannot begin", generation=command.generation, reason=str(error))
        standing = engine.report()
        begun = Begun(command.generation, standing.version, standing.initialized, ())
        return _ready(engine, begun, error=str(error))
    if begun is None:
        return None
    return _ready(engine, begun)


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
