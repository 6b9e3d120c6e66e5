"""The interface between a performer and a model with its data."""

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


class PullSnapshot(Protocol):
    """Receives values of a snapshot that shards keep, given its name."""

    def __call__(
        self,
        snapshot: str,
        into: Mapping[str, Array] | None,
        /,
        *,
        rows: ReceivedRows | None = None,
    ) -> None:
        """Pulls parameters into whole arenas; with None only ``rows``."""


class GradientResult(Protocol):
    """The result of one step."""

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Per shard: gradients of trainable arenas, new minus old value of state arenas, the new
        value of replaced ones. Empty if not finite. Valid until the second swap."""

    @property
    def loss(self) -> float:
        """Mean over the batch."""

    @property
    def finite(self) -> bool:
        """Whether no element of the gradients is NaN or infinite."""

    @property
    def metrics(self) -> Sequence[float]:
        """The variables of the job's metrics after this batch alone, flat."""

    @property
    def rows(self) -> Sequence[Mapping[int, Rows]]:
        """Per shard, by table index, the gradients of table rows. Empty if not finite, or without
        tables."""


class WithoutTables:
    """The table methods of a source that has no embedding tables."""

    def rows_nbytes(self, _plan: Plan, /) -> int:
        """See GradientSource, also for the other methods."""
        return 0

    def ahead(self, _batch: BatchId, /) -> Any | None:
        return None

    def place(self, _given: Any, /) -> ReceivedRows | None:
        return None


class OneAtOnce:
    """The methods of a source that computes one gradient at a time."""

    @property
    def at_once(self) -> int:
        """See GradientSource, also for the other methods."""
        return 1

    @property
    def sums(self) -> bool:
        return False

    @property
    def exact(self) -> bool:
        return True

    def gradients(self, _batches: Any, _given: Any, /) -> Sequence[GradientResult]:
        raise AssertionError("gradient() computes one at a time")

    def add(self, _results: Any, /) -> Sequence[Gradient]:
        raise AssertionError("there is one gradient at a time")


class GradientSource(Protocol):
    """A model, its data and its parameters. One thread uses it.

    All methods raise ``InvalidJob`` if the user's code or data fails. Parameters are received into
    :attr:`spare` while results of the last step are still being sent; :meth:`swap` makes the spare
    set current. Both are sets of the last :meth:`prepare`'s workspace.
    """

    @property
    def wire(self) -> Encoding:
        """The encoding in which float32 arenas of trainable variables are pulled."""

    @property
    def spare(self) -> Mapping[str, Array]:
        """Where to receive parameters: arena name -> ``[length]``. Alternates between two mappings,
        which stay the same as long as the workspace does."""

    @property
    def at_once(self) -> int:
        """How many gradients :meth:`gradients` computes at once, one on each device. Known once
        :meth:`prepare` has returned."""

    @property
    def sums(self) -> bool:
        """Whether gradients computed at once are pushed as a sum (async), then without compression
        and without row gradients."""

    @property
    def exact(self) -> bool:
        """Whether each gradient of a round is pushed by itself (sync). If not, none is
        compressed."""

    def build(self) -> None:
        """Makes the model; called once, before all other methods."""

    def rows_nbytes(self, plan: Plan, /) -> int:
        """Estimates the bytes of a batch's rows; 0 without tables."""

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        """Uses ``plan`` and ``workspace`` from now on; called when the worker has joined."""

    def leave(self) -> None:
        """Releases the workspace and expected batches. Forgets what compression has left out, since
        the fate of the last gradient is unknown."""

    def initial_values(self, first_rows: str = "", /) -> Mapping[str, Array]:
        """Returns the shards' first values: arena name -> ``[length]``, aligned; those of the
        checkpoint ``first_rows`` if not empty, since tables begin with its rows."""

    def expect(self, batches: Iterable[BatchId]) -> None:
        """Announces the batches that follow those expected before; they may be read ahead."""

    def forget(self) -> None:
        """Cancels the expected batches."""

    def waiting(self, now: bool, /) -> None:
        """Says whether the training thread waits for shards; while it does, batches are read ahead.
        Any thread may call it."""

    def read(self, batch: BatchId) -> Any:
        """Returns the data of ``batch``, for :meth:`gradient`."""

    def ahead(self, batch: BatchId, /) -> Any | None:
        """Returns the result of :meth:`read` if it is available already."""

    def place(self, given: Any, /) -> ReceivedRows | None:
        """Returns where to receive the rows that a batch needs, given its data; None if it needs
        none. Valid until the call after the next."""

    def gradient(self, batch: BatchId, given: Any, rows: ReceivedRows | None, /) -> GradientResult:
        """Computes the gradient of ``batch`` at the current parameters and its ``rows``."""

    def gradients(
        self, batches: Sequence[BatchId], given: Sequence[Any], /
    ) -> Sequence[GradientResult]:
        """Computes the gradients of several batches at once, at most :attr:`at_once`, each on a
        device of its own, at the current parameters. A model without tables only."""

    def add(self, results: Sequence[GradientResult], /) -> Sequence[Gradient]:
        """Returns, per shard, the sum of finite gradients of the last :meth:`gradients`: of
        replaced arenas the last value, as if they had been pushed one after the other. Empty if an
        element of the sum is infinite. Only with :attr:`sums`, or without :attr:`exact`."""

    def swap(self, version: int) -> None:
        """Makes the spare parameters current; ``version`` is the newest among the shards' parts."""

    def settle(self, unused: Iterable[int] = (), batch: BatchId | None = None, /) -> None:
        """Records that all shards but ``unused`` have used or will use the gradient of ``batch``;
        None is the last one."""

    def not_finite(self, batch: BatchId, /) -> str:
        """Names the records of ``batch`` that have NaN or infinite values, to explain a gradient
        that is not finite. Empty if there are none, or if unknown."""

    def take_back(self, batch: BatchId | None = None, /) -> None:
        """Records that no shard has used or will use the gradient of ``batch``, or (None) any that
        is not settled yet."""

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        """Evaluates the records of ``task`` on its snapshot of ``generation``."""

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        """Returns the results of summed metric states, by metric name."""
