"""Where a worker's gradients come from: what its performer asks of a model and its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows


class Pull(Protocol):
    """Receives values of a kept snapshot, by its name."""

    def __call__(
        self,
        snapshot: str,
        into: Mapping[str, Array] | None,
        /,
        *,
        rows: ReceivedRows | None = None,
    ) -> None:
        """Parameters go into whole arenas; None receives ``rows`` alone."""


class Result(Protocol):
    """What one step gives."""

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """What each shard gets: gradients of trainable arenas, new minus old value of state arenas,
        the new value of replaced ones.
        Empty if not finite. Valid until the second swap."""

    @property
    def loss(self) -> float:
        """Mean over the batch."""

    @property
    def finite(self) -> bool:
        """No element of the gradients is NaN or infinite."""

    @property
    def metrics(self) -> Sequence[float]:
        """The variables of the job's metrics after this batch alone, flat."""

    @property
    def rows(self) -> Sequence[Mapping[int, Rows]]:
        """What each shard gets for rows of embedding tables, by the index of the table: their
        gradients. Empty if not finite, or without tables."""


class WithoutTables:
    """The part of a source that has to do with embedding tables, of one that has none."""

    def rows_nbytes(self, _plan: Plan, /) -> int:
        """See GradientSource, as for all methods here."""
        return 0

    def ahead(self, _batch: BatchId, /) -> Any | None:
        return None

    def place(self, _given: Any, /) -> ReceivedRows | None:
        return None


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

    def rows_nbytes(self, plan: Plan, /) -> int:
        """About how much memory the rows of a batch take; 0 without tables."""

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        """The worker has joined: everything is for these from now on."""

    def leave(self) -> None:
        """Lets go of the workspace and of what was expected, and forgets what compression has left
        out: nobody can say what became of the last gradient."""

    def initial_values(self, first_rows: str = "", /) -> Mapping[str, Array]:
        """What the shards are initialized with: arena name -> ``[length]``, aligned; of the
        checkpoint ``first_rows`` if that is not empty, since tables begin with its rows."""

    def expect(self, batches: Iterable[BatchId]) -> None:
        """These batches come after those that were expected before; they may be read ahead."""

    def forget(self) -> None:
        """What was expected does not come."""

    def waiting(self, now: bool, /) -> None:
        """Whether the thread that uses this waits for the shards: a good time to read ahead. Called
        by any thread."""

    def read(self, batch: BatchId) -> Any:
        """The data of ``batch``, for :meth:`gradient`."""

    def ahead(self, batch: BatchId, /) -> Any | None:
        """What :meth:`read` will give, if it is there already."""

    def place(self, given: Any, /) -> ReceivedRows | None:
        """Where the rows of tables that a batch needs are to be received, by its data; None where
        it needs none. Good until the second call after."""

    def gradient(self, batch: BatchId, given: Any, rows: ReceivedRows | None, /) -> Result:
        """The gradient of ``batch`` at the current parameters, and at its ``rows``."""

    def swap(self, version: int) -> None:
        """The spare parameters have been received: compute with them from now on. ``version`` is
        the newest that a shard's part has."""

    def settle(self, unused: Iterable[int] = ()) -> None:
        """The last gradient was used by all shards but ``unused``, which never will use it."""

    def not_finite(self, batch: BatchId, /) -> str:
        """Which records of ``batch``, whose gradient was not finite, are not finite either, in
        words; empty where they are, or cannot be told."""

    def take_back(self) -> None:
        """No shard has used the last gradient, if it was not settled, and none will."""

    def evaluate(self, task: pb.EvaluateTask, generation: int, pull: Pull) -> pb.EvaluateDone:
        """Evaluates the records of ``task`` on its snapshot, as it is in ``generation``."""

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        """The results of summed metric states, by metric name."""
