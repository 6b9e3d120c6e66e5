"""The slow disk work of a job."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSet
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TypeVar

from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.checkpoints.choice import Chosen, check_changed_copy, choose_checkpoint
from coordinator.checkpoints.snapshots import Taken
from coordinator.core.run import Run
from psrpc.checkpoint.manifest import TEMPORARY
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.names import CHECKPOINTS
from psrpc.files.storage import DISK, Storage
from psrpc.ops.logs import get_logger
from psrpc.ops.tracing import span

log = get_logger()

CLOSE_S = 10.0
"""Time that the coordinator waits at its end for work in flight."""

Result = TypeVar("Result")
Warnings = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrittenManifest:
    """The result of a commit: ``error`` says why there is no checkpoint. ``damaged`` means that
    reading it back gave other bytes than were written."""

    taken: Taken
    generation: int
    error: str = ""
    warnings: tuple[str, ...] = ()
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """The newest good checkpoint, or None and the reason. ``seen`` means that there are bad ones,
    ``again`` that the disk failed and may answer later."""

    chosen: Chosen | None
    reason: str = ""
    seen: bool = False
    again: bool = False


class DiskWork:
    """Makes, commits, removes and chooses the checkpoints of a run. Slow work calls back once, on
    the engine's loop and never before the method has returned. Used from one event loop."""

    def __init__(self, run: Run, storage: Storage = DISK) -> None:
        self._run = run
        self._storage = storage
        self._checkpoints = Checkpoints(run, storage)
        # The first item is in progress.
        self._turns: deque[tuple[str, Callable[[], None]]] = deque()

    def start(self, what: str, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Queues ``work``, which ``what`` describes, behind earlier work; passes its result to
        ``done``."""
        self._turns.append((what, partial(self.begin, work, done)))
        if len(self._turns) == 1:
            self._turns[0][1]()

    @property
    def under_way(self) -> str:
        """The work in progress, in words; empty if there is none."""
        return self._turns[0][0] if self._turns else ""

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Starts ``work`` elsewhere at once, passes its result to ``done``, and then always calls
        :meth:`over`."""
        raise NotImplementedError

    def over(self) -> None:
        """Ends the current piece of work and starts the next one."""
        self._turns.popleft()
        if self._turns:
            self._turns[0][1]()

    @property
    def gone(self) -> bool:
        """Whether the run directory was missing at the last attempt to make a checkpoint."""
        return self._checkpoints.gone

    def prepare(self, order: SnapshotOrder) -> None:
        """Makes the directory that shards write to. Raises CheckpointError."""
        self._checkpoints.prepare(order)

    def discard(self, order: SnapshotOrder) -> None:
        """Removes the files that shards wrote of a failed checkpoint."""
        self._checkpoints.discard(order)

    def commit(
        self,
        taken: Taken,
        generation: int,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[WrittenManifest], None],
    ) -> None:
        """Commits a checkpoint that was ordered in ``generation``, and removes old ones as
        :meth:`Checkpoints.retain` does."""
        self.start(
            f"the commit of checkpoint {taken.order.name}",
            lambda: commit_checkpoint(self._checkpoints, taken, generation, scores, in_use),
            done,
        )

    def retain(
        self,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Warnings], None],
    ) -> None:
        """Removes old checkpoints only."""
        self.start(
            "the removal of old checkpoints",
            lambda: retain(self._checkpoints, scores, in_use),
            done,
        )

    def choose(self, refused: Mapping[str, str], done: Callable[[DiskChoice], None]) -> None:
        """Finds the newest good checkpoint, except those ``refused``: name to reason."""
        lasting = self._checkpoints.lasting
        self.start(
            "the choice of the newest good checkpoint",
            lambda: choose(self._run, refused, self._storage, lasting),
            done,
        )

    def check_copy(self, name: str, of: str, done: Callable[[Chosen | str], None]) -> None:
        """Checks that ``name``, a changed copy of checkpoint ``of``, may be restored in its place;
        passes ``done`` the result, or why it may not."""
        self.start(
            f"the check of checkpoint {name}",
            lambda: check_copy(self._run, name, of, self._storage, self._checkpoints.lasting),
            done,
        )


class ThreadedDisk(DiskWork):
    """Runs the work on daemon threads, so that storage that hangs delays the end of the process by
    no more than :data:`CLOSE_S`."""

    def __init__(self, run: Run, failed: Callable[[str], object]) -> None:
        """``failed`` is called on the loop, with the reason, if work fails unexpectedly: the job
        would wait for its result for ever."""
        super().__init__(run)
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for the started work; abandons work that takes too long, with a warning. Abandoned
        work takes effect or not, as if the process had been killed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self._tasks:
            over, late = await asyncio.wait(self._tasks, timeout=max(0.0, deadline - loop.time()))
            for task in over:
                task.result()
            if not late:
                continue
            log.warning("storage hangs, and is left", waited_for=self.under_way, waited_s=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(late)
            return

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """See :class:`DiskWork`."""

        async def run() -> None:
            try:
                done(await asyncio.wrap_future(_on_thread(work)))
            except Exception as error:  # no other code looks at the task's result
                log.exception("the disk's work has failed")
                self._failed(f"the disk's work has failed, which was not foreseen: {error!r}")
            self.over()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _on_thread(work: Callable[[], Result]) -> Future[Result]:
    """Runs ``work`` on a daemon thread, since a process that ends waits for asyncio's own
    threads."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    context = copy_context()

    def target() -> None:
        try:
            result = context.run(work)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=target, name="disk", daemon=True).start()
    return future


def commit_checkpoint(
    checkpoints: Checkpoints,
    taken: Taken,
    generation: int,
    scores: Mapping[tuple[int, int], float],
    in_use: Collection[str],
) -> WrittenManifest:
    """Commits a checkpoint and removes old ones. Blocks."""
    try:
        with span("checkpoint", checkpoint=taken.order.name):
            checkpoints.commit(taken, generation)
    except CheckpointError as error:
        return WrittenManifest(taken, generation, error.coded)
    except Exception as error:  # not foreseen; without an answer the job would wait for ever
        return WrittenManifest(taken, generation, repr(error))
    warnings = retain(checkpoints, scores, in_use)
    damaged = checkpoints.is_damaged(taken.order.name)
    return WrittenManifest(taken, generation, warnings=warnings, damaged=damaged)


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
) -> DiskChoice:
    """Finds the newest good checkpoint of a run and makes its name durable; see
    :func:`choose_checkpoint`. Blocks."""
    present: list[str] = []
    try:
        present = _present(run, storage)
        chosen = choose_checkpoint(
            run.run_dir, run.description, run.run_id, refused, storage, run.plan, lasting
        )
    except OSError as error:
        return DiskChoice(None, f"{run.run_dir / CHECKPOINTS} cannot be used: {error}", again=True)
    except (CheckpointError, InvalidJob) as error:
        return DiskChoice(None, str(error), seen=bool(present))
    except Exception as error:  # as above
        return DiskChoice(None, repr(error), seen=bool(present))
    return DiskChoice(chosen)


def check_copy(
    run: Run, name: str, of: str, storage: Storage, lasting: MutableSet[str]
) -> Chosen | str:
    """Returns the checkpoint ``name`` or why it cannot be restored in place of ``of``. Blocks."""
    try:
        return check_changed_copy(run, name, of, storage, lasting)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{run.run_dir / CHECKPOINTS / name} cannot be used: {error}"
    except Exception as error:  # not foreseen; without an answer the attendant would wait for ever
        return repr(error)


def _present(run: Run, storage: Storage) -> list[str]:
    """Names of checkpoints, good or not."""
    names = storage.directories(run.run_dir / CHECKPOINTS)
    return [name for name in names if not name.startswith(TEMPORARY)]
