"""Operations on a disk that fail, or whose process is killed, midway: the real code, with
a word after each thing that others may rely on from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.checkpoints.snapshots import Taken, checkpoint_name, temporary_directory
from coordinator.records import ledger_file
from coordinator.records.store import Store
from coordinator.records.stored_values import GENERATION
from psrpc.checkpoint.checkpoint import ShardState, shard_file_name, write_shard_file
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, SnapshotOrder
from psrpc.core.errors import CheckpointError
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import ShardFile
from tests.coordinator.builders import make_run

Say = Callable[[str], None]

SHARDS = 2
STEPS = (1, 2, 3)
ROUNDS = 4
LEDGER = "ledger.sqlite"


def state_of(plan: Plan, shard: int, step: int) -> ShardState:
    """Values by which a step and an element are known."""
    return ShardState(
        values={
            arena.name: 1000.0 * step
            + np.arange(arena.cuts[shard], arena.cuts[shard + 1], dtype=arena.dtype)
            for arena in plan.arenas
        },
        version=step,
    )


def save(checkpoints: Checkpoints, run_dir: Path, plan: Plan, step: int, generation: int) -> None:
    """One checkpoint, as the coordinator and its shards make it. Raises CheckpointError."""
    name = checkpoint_name(step, generation)
    order = SnapshotOrder(name, step, True, False, temporary_directory(name))
    try:
        checkpoints.prepare(order)
        files = []
        for shard in range(plan.shards):
            written = write_shard_file(
                run_dir / order.directory / shard_file_name(shard, plan.shards),
                plan,
                shard,
                state_of(plan, shard, step),
                run_id="r1",
                generation=generation,
                global_step=step,
            )
            files.append(ShardFile(shard, step, written.name, written.nbytes, written.sha256))
        checkpoints.commit(Taken(order, tuple(files)), generation)
    except CheckpointError:
        checkpoints.discard(order)
        raise


def checkpoints(run_dir: Path, say: Say) -> None:
    """Writes a checkpoint after the other and keeps one; goes on after one that fails."""
    run = make_run(run_dir, shards=SHARDS, generation=1, keep_checkpoints=1)
    made = Checkpoints(run)
    for step in STEPS:
        try:
            save(made, run_dir, run.plan, step, 1)
        except CheckpointError as error:
            say(f"failed {step} {error}")
        else:
            say(f"committed {step}")
        for warning in made.retain({}):
            say(f"warning {warning}")


def ledger(run_dir: Path, say: Say) -> None:
    """Raises a generation and decides rounds, as a coordinator does."""
    # So that the log is folded into the file after a few rounds already.
    ledger_file.LOG_PAGES = 8
    ledger_file.RESERVED_BYTES = 1 << 14
    with Store(run_dir / LEDGER) as store:
        for generation in (1, 2):
            store.put(GENERATION, generation)
            say(f"generation {generation}")
            for number in range(ROUNDS):
                store.put_decision(decision(generation, number))
                say(f"round {generation} {number}")


def decision(generation: int, number: int) -> Decision:
    """The decision of a round."""
    attempts = tuple(Attempt(BatchId(0, 10 * k, 10 * k + 10), number + k) for k in range(20))
    return Decision(generation, number, attempts)


SCENARIOS: dict[str, Callable[[Path, Say], None]] = {
    "checkpoints": checkpoints,
    "ledger": ledger,
}
