"""The slow work of a job on its disk, as its course asks for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSet
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from coordinator.checkpoints import Checkpoints, Chosen, choose_checkpoint
from coordinator.run import Run
from coordinator.saving import CHECKPOINTS
from coordinator.snapshots import Taken
from coordinator.work import SnapshotOrder
from psrpc.errors import CheckpointError, InvalidJob
from psrpc.logs import get_logger
from psrpc.manifest import TEMPORARY
from psrpc.storage import DISK, Storage
from psrpc.tracing import span

log = get_logger()

Result = TypeVar("Result")
Warnings = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What came of writing a manifest: ``error`` says why there is no checkpoint. ``damaged``: it
    was read back, and is not what was written."""

    taken: Taken
    generation: int
    error: str = ""
    warnings: tuple[str, ...] = ()
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest good checkpoint, or None and why there is none. ``seen`` when there are some that
    are not good, ``again`` when the disk did not say and may do so later."""

    chosen: Chosen | None
    reason: str = ""
    seen: bool = False
    again: bool = False


class DiskWork:
    """Makes, commits, removes and chooses the checkpoints of a run. What may take long calls back
    once, on the engine's loop and never before it has returned. Used from one event loop."""

    def __init__(self, run: Run, storage: Storage = DISK) -> None:
        self._run = run
        self._storage = storage
        self._checkpoints = Checkpoints(run, storage)
        # The first has its turn.
        self._turns: deque[Callable[[], None]] = deque()

    def start(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Has ``work`` done elsewhere, once what was started before it is over, and tells ``done``
        what came of it."""
        self._turns.append(partial(self.begin, work, done))
        if len(self._turns) == 1:
            self._turns[0]()

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Has ``work`` done elsewhere at once, tells ``done`` what came of it, and then calls
        :meth:`over`, whatever happened."""
        raise NotImplementedError

    def over(self) -> None:
        """The piece of work that had its turn is over: the next one begins."""
        self._turns.popleft()
        if self._turns:
            self._turns[0]()

    def prepare(self, order: SnapshotOrder) -> None:
        """Makes the directory that shards write to. Raises CheckpointError."""
        self._checkpoints.prepare(order)

    def discard(self, order: SnapshotOrder) -> None:
        """Removes what shards wrote of a checkpoint that failed."""
        self._checkpoints.discard(order)

    def commit(
        self,
        taken: Taken,
        generation: int,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Committed], None],
    ) -> None:
        """Commits a checkpoint that was ordered in ``generation``, and removes old ones as
        :meth:`Checkpoints.retain` does."""
        self.start(lambda: commit(self._checkpoints, taken, generation, scores, in_use), done)

    def retain(
        self,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Warnings], None],
    ) -> None:
        """Removes old checkpoints alone."""
        self.start(lambda: retain(self._checkpoints, scores, in_use), done)

    def choose(self, refused: Mapping[str, str], done: Callable[[Choice], None]) -> None:
        """Finds the newest good checkpoint besides ``refused``, names and why."""
        lasting = self._checkpoints.lasting
        self.start(lambda: choose(self._run, refused, self._storage, lasting), done)


class ThreadedDisk(DiskWork):
    """On other threads than the loop's."""

    def __init__(self, run: Run, failed: Callable[[str], object], storage: Storage = DISK) -> None:
        """``failed`` hears, on the loop, why a piece of work was never answered: who waits for it
        waits for ever."""
        super().__init__(run, storage)
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for the work that was started."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """See :class:`DiskWork`."""

        async def run() -> None:
            try:
                done(await asyncio.to_thread(work))
            except Exception as error:  # nobody else looks at what became of the task
                log.exception("the disk's work has failed")
                self._failed(f"the disk's work has failed, which was not foreseen: {error!r}")
            self.over()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def commit(
    checkpoints: Checkpoints,
    taken: Taken,
    generation: int,
    scores: Mapping[tuple[int, int], float],
    in_use: Collection[str],
) -> Committed:
    """Commits a checkpoint and removes old ones. Blocks."""
    try:
        with span("checkpoint", checkpoint=taken.order.name):
            checkpoints.commit(taken, generation)
    except CheckpointError as error:
        return Committed(taken, generation, error.coded)
    except Exception as error:  # not foreseen; without an answer the job would wait for ever
        return Committed(taken, generation, repr(error))
    warnings = retain(checkpoints, scores, in_use)
    damaged = checkpoints.is_damaged(taken.order.name)
    return Committed(taken, generation, warnings=warnings, damaged=damaged)


def retain(
    checkpoints: Checkpoints, scores: Mapping[tuple[int, int], float], in_use: Collection[str]
) -> Warnings:
    """Removes old checkpoints; returns warnings. Blocks."""
    try:
        return checkpoints.retain(scores, in_use)
    except OSError as error:
        return (f"old checkpoints stay: {error}",)


def choose(
    run: Run,
    refused: Mapping[str, str],
    storage: Storage = DISK,
    lasting: MutableSet[str] | None = None,
) -> Choice:
    """Finds the newest good checkpoint of a run, whose name lasts then; see
    :func:`choose_checkpoint`. Blocks."""
    present: list[str] = []
    try:
        present = _present(run, storage)
        chosen = choose_checkpoint(
            run.run_dir, run.description, run.run_id, refused, storage, run.plan, lasting
        )
    except OSError as error:
        return Choice(None, f"{run.run_dir / CHECKPOINTS} cannot be used: {error}", again=True)
    except (CheckpointError, InvalidJob) as error:
        return Choice(None, str(error), seen=bool(present))
    except Exception as error:  # as above
        return Choice(None, repr(error), seen=bool(present))
    return Choice(chosen)


def _present(run: Run, storage: Storage) -> list[str]:
    """Names of checkpoints, good or not."""
    names = storage.directories(run.run_dir / CHECKPOINTS)
    return [name for name in names if not name.startswith(TEMPORARY)]
