"""Where a worker's gradients come from: what its performer asks of a model and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pserver.workspace import Workspace
from psrpc.batch import BatchId
from psrpc.encoding import Encoding, Gradient
from psrpc.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb
from worker.data import Array

Pull = Callable[[str, Mapping[str, Array]], None]
"""Receives the parameters of a kept snapshot, by its name, into whole arenas."""


class Result(Protocol):
    """What one step gives."""

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """What each shard gets: gradients of trainable arenas, new minus old value of state arenas.
        Empty if not finite. Valid until the second swap."""

    @property
    def loss(self) -> float:
        """Mean over the batch."""

    @property
    def finite(self) -> bool:
        """No element of the gradients is NaN or infinite."""


class GradientSource(Protocol):
    """A model, its data and its parameters. One thread uses it.

    All methods raise ``InvalidJob`` where the user's code or data fails. Parameters are received
    into :attr:`spare` while the results of the last step are still on their way; :meth:`swap` then
    makes the spare set current. Both are sets of the workspace that was given last.
    """

    @property
    def wire(self) -> Encoding:
        """How float32 arenas of trainable variables are pulled."""

    @property
    def spare(self) -> Mapping[str, Array]:
        """Where parameters are received: arena name -> ``[length]``; the same two mappings for as
        long as the workspace is the same."""

    def build(self) -> None:
        """Makes the model; called once, before anything else."""

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        """The worker has joined: everything is for these from now on."""

    def leave(self) -> None:
        """Lets go of the workspace and of what was expected, and forgets what compression has left
        out: nobody can say what became of the last gradient."""

    def initial_values(self) -> Mapping[str, Array]:
        """What the shards are initialized with: arena name -> ``[length]``, aligned."""

    def expect(self, batches: Iterable[BatchId]) -> None:
        """These batches come after those that were expected before; they may be read ahead."""

    def forget(self) -> None:
        """What was expected does not come."""

    def read(self, batch: BatchId) -> Any:
        """The data of ``batch``, for :meth:`gradient`."""

    def gradient(self, batch: BatchId, given: Any) -> Result:
        """The gradient of ``batch`` at the current parameters."""

    def swap(self, version: int) -> None:
        """The spare parameters have been received: compute with them from now on. ``version`` is
        the newest that a shard's part has."""

    def settle(self, unused: Iterable[int] = ()) -> None:
        """The last gradient was used by all shards but ``unused``, which never will use it."""

    def take_back(self) -> None:
        """No shard has used the last gradient, if it was not settled, and none will."""

    def evaluate(self, task: pb.EvaluateTask, generation: int, pull: Pull) -> pb.EvaluateDone:
        """Evaluates the records of ``task`` on its snapshot, as it is in ``generation``."""

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        """The results of summed metric states, by metric name."""
