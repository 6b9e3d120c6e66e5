"""Evaluations of frozen snapshots, as tasks that any worker may take while training goes on.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.core.wording import of
from coordinator.core.work import EvaluationWork, MergeWork, MetricVariable
from psrpc.core.batch import LOSS
from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted, first_names

FINAL = "final"
"""The name of the last evaluation."""

TASK_RECORDS = 2000
"""Approximate number of records of a task, which consists of whole batches."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """A finished evaluation of the state at ``global_step``: Keras metric name to value."""

    evaluation: str
    global_step: int
    snapshot: str
    values: Mapping[str, float]


@dataclass(slots=True)
class _Evaluation:
    name: str
    snapshot: str
    global_step: int
    ranges: list[tuple[int, int]]
    ready: bool = False
    holders: dict[int, str] = field(default_factory=dict)
    states: dict[int, tuple[MetricVariable, ...]] = field(default_factory=dict)
    merger: str | None = None
    training: bool = False


class Evaluations:
    """A queue of evaluations. Workers do the oldest first; each task counts once, with the first
    result. Not thread-safe."""

    def __init__(self, records: int, batch_size: int, whole: bool = False) -> None:
        """``whole`` makes one task of all records, for metrics whose states cannot be summed."""
        self._ranges = [(0, records)] if whole and records else _cut(records, batch_size)
        self._queue: deque[_Evaluation] = deque()
        self._finished: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether no evaluation is queued or running."""
        return not self._queue

    @property
    def snapshots(self) -> tuple[str, ...]:
        """The snapshots that are still to be evaluated."""
        return tuple(e.snapshot for e in self._queue if not e.training)

    def add(self, name: str, snapshot: str, global_step: int) -> None:
        """Queues the evaluation of an ordered snapshot."""
        self._queue.append(_Evaluation(name, snapshot, global_step, self._ranges))

    def add_training(self, name: str, global_step: int, totals: tuple[float, ...]) -> None:
        """Queues the merge of an epoch's totals, see :mod:`psrpc.core.batch`, once per name."""
        if name in self._finished or any(e.name == name for e in self._queue):
            return
        loss, states = totals[:LOSS], totals[LOSS:]
        variables = MetricVariable((LOSS,), loss), MetricVariable((len(states),), states)
        done = _Evaluation(name, "", global_step, [(0, 0)], ready=True, training=True)
        done.states[0] = variables
        self._queue.append(done)

    def snapshot_taken(self, snapshot: str) -> None:
        """Starts the evaluation of a snapshot that all shards keep now."""
        for evaluation in self._queue:
            if evaluation.snapshot == snapshot:
                evaluation.ready = True

    def drop(self, snapshot: str) -> list[str]:
        """Gives up the evaluations of a snapshot that failed; returns their names."""
        dropped = [e.name for e in self._queue if e.snapshot == snapshot]
        self._queue = deque(e for e in self._queue if e.snapshot != snapshot)
        self._finished.update(dropped)
        return dropped

    def lease(self, worker: str) -> EvaluationWork | MergeWork | None:
        """Returns work for ``worker``: a task that it holds already, an open task, or the merge.
        None while no evaluation is ready, or when other workers hold all that is left."""
        current = self._queue[0] if self._queue and self._queue[0].ready else None
        if current is None:
            return None
        if len(current.states) == len(current.ranges):
            if current.merger in (None, worker):
                current.merger = worker
                return MergeWork(current.name, _total(current.states), current.training)
            return None
        held = next((t for t, holder in current.holders.items() if holder == worker), None)
        if held is None:
            taken = current.holders.keys() | current.states.keys()
            held = next((t for t in range(len(current.ranges)) if t not in taken), None)
        if held is None:
            return None
        current.holders[held] = worker
        start, stop = current.ranges[held]
        return EvaluationWork(current.name, held, current.snapshot, start, stop)

    def report(
        self,
        worker: str,
        evaluation: str,
        task: int,
        records: int,
        states: tuple[MetricVariable, ...],
    ) -> bool:
        """Records a task's metric states; returns whether they count, which requires that
        ``worker`` holds the task.

        Raises:
            InvalidArgument: no such evaluation or task, a wrong number of records, or states of
                other shapes than the other tasks'.
        """
        found = self._find(evaluation)
        if found is None:
            return False
        if not 0 <= task < len(found.ranges):
            raise InvalidArgument(
                f"evaluation {evaluation} has tasks 0..{len(found.ranges) - 1}, not {task}"
            )
        start, stop = found.ranges[task]
        if records != stop - start:
            raise InvalidArgument(
                f"{worker} evaluated {counted(records, 'record')} for task {task} of {evaluation}; "
                f"expected {stop - start} (records {start}..{stop - 1})"
            )
        shapes = [v.shape for v in states]
        for other in found.states.values():
            if [v.shape for v in other] != shapes:
                raise InvalidArgument(
                    f"{worker} sent metric variables of shapes {shapes} for task {task} of "
                    f"{evaluation}; other tasks have {[v.shape for v in other]}"
                )
        if found.holders.get(task) != worker:
            return False
        del found.holders[task]
        if task in found.states:
            return False
        found.states[task] = states
        return True

    def merged(
        self, worker: str, evaluation: str, values: Mapping[str, float]
    ) -> EvaluationResult | None:
        """Records the results of the merge that ``worker`` does; None when they are known already,
        or another worker does the merge.

        Raises:
            InvalidArgument: there is no such evaluation, or its tasks are not done.
        """
        found = self._find(evaluation)
        if found is None:
            return None
        if len(found.states) < len(found.ranges):
            raise InvalidArgument(f"evaluation {evaluation} was merged before its tasks were done")
        if found.merger != worker:
            return None
        self._queue.remove(found)
        self._finished.add(evaluation)
        return EvaluationResult(evaluation, found.global_step, found.snapshot, dict(values))

    def release(self, worker: str) -> int:
        """Reopens the tasks that ``worker`` holds to all workers; returns their number."""
        opened = 0
        for evaluation in self._queue:
            mine = [t for t, holder in evaluation.holders.items() if holder == worker]
            for task in mine:
                del evaluation.holders[task]
            if evaluation.merger == worker:
                evaluation.merger = None
                opened += 1
            opened += len(mine)
        return opened

    def waiting_for(self) -> str:
        """Names the event that the oldest evaluation waits for; empty when there is none."""
        if not self._queue:
            return ""
        current = self._queue[0]
        if not current.ready:
            return f"snapshot {current.snapshot} for evaluation {current.name}"
        if len(current.states) == len(current.ranges):
            return f"{current.merger or 'a worker'} to merge evaluation {current.name}"
        holders = first_names(current.holders.values()) or "a worker"
        done = of(len(current.states), len(current.ranges), "task", "tasks")
        return f"{holders} to do evaluation {current.name} ({done} done)"

    def _find(self, evaluation: str) -> _Evaluation | None:
        """Returns the evaluation, or None when it is finished. Raises InvalidArgument."""
        found = next((e for e in self._queue if e.name == evaluation), None)
        if found is None and evaluation not in self._finished:
            raise InvalidArgument(f"there is no evaluation {evaluation!r}")
        return found


def evaluation_of(epoch: int) -> str:
    """Names the evaluation after an epoch, which counts from 0 here and from 1 in the name."""
    return f"epoch-{epoch + 1}"


TRAINING = "training of "
"""Load-bearing: prefix of an epoch's evaluation for the metrics of its training data."""


def training_of(epoch: int) -> str:
    """Names the merge of an epoch's totals."""
    return f"{TRAINING}{evaluation_of(epoch)}"


def epoch_of(evaluation: str, last: int) -> int:
    """Returns the epoch of an evaluation, or of a merge of totals, by its name; ``last`` is the
    epoch of the :data:`FINAL` evaluation."""
    name = evaluation.removeprefix(TRAINING)
    return last if name == FINAL else int(name.removeprefix("epoch-")) - 1


def _cut(records: int, batch_size: int) -> list[tuple[int, int]]:
    """Cuts the records into ranges of whole batches, of about ``TASK_RECORDS`` each."""
    size = max(1, round(TASK_RECORDS / batch_size)) * batch_size
    return [(start, min(start + size, records)) for start in range(0, records, size)]


def _total(states: Mapping[int, tuple[MetricVariable, ...]]) -> tuple[MetricVariable, ...]:
    """Sums over tasks in task order, so that the result does not depend on their timing."""
    ordered = [states[task] for task in sorted(states)]
    return tuple(
        MetricVariable(
            variables[0].shape,
            tuple(sum(values) for values in zip(*(v.values for v in variables), strict=True)),
        )
        for variables in zip(*ordered, strict=True)
    )
