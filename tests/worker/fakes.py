"""A model that needs no TensorFlow, as a performer sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient, plain
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array
from worker.step.gradient_source import (
    GradientResult,
    OneAtOnce,
    PullSnapshot,
    WithoutTables,
)


@dataclass(frozen=True)
class FakeResult:
    """A :class:`worker.step.gradient_source.GradientResult`."""

    gradients: tuple[Gradient, ...]
    loss: float = 1.0
    finite: bool = True
    rows: Sequence[Mapping[int, Rows]] = ()
    metrics: Sequence[float] = ()


class FakeSource(WithoutTables, OneAtOnce):
    """The model-independent part of a :class:`worker.step.gradient_source.GradientSource`.
    A subclass adds ``initial_values``, ``read`` and ``gradient``."""

    wire: Encoding = "plain"
    spare: Mapping[str, Array]
    _current: Mapping[str, Array]

    def build(self) -> None:
        """See GradientSource, as for all methods here."""

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        self._current, self.spare = workspace.sets

    def leave(self) -> None:
        self._current = self.spare = {}

    def expect(self, batches: Iterable[BatchId]) -> None: ...

    def forget(self) -> None: ...

    def waiting(self, now: bool, /) -> None: ...

    def swap(self, version: int) -> None:
        self._current, self.spare = self.spare, self._current

    def settle(self, unused: Iterable[int] = (), batch: BatchId | None = None) -> None: ...

    def not_finite(self, _batch: BatchId, /) -> str:
        return ""

    def take_back(self, batch: BatchId | None = None) -> None: ...

    def add(self, results: Sequence[GradientResult], /) -> Sequence[Gradient]:
        found = []
        for gradients in zip(*[result.gradients for result in results], strict=True):
            parts = [{name: one.parts[0] for name, one in each.items()} for each in gradients]
            found.append(
                {name: plain(_summed([part[name] for part in parts])) for name in parts[0]}
            )
        return found

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        raise AssertionError("there is nothing to evaluate")

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        raise AssertionError("there is nothing to merge")


def _summed(arrays: Sequence[Array]) -> Array:
    if arrays[0].dtype.kind != "f":
        # Whole numbers are replaced by the last ones.
        return arrays[-1]
    total: Array = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
    return total
