"""The coordinator's knowledge of a job: the JSON that ``worker describe`` prints.

User code and TensorFlow run in that child process, never in the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from coordinator.core.plateau import ReduceLr, StopEarly
from coordinator.core.retention import Objective
from psrpc.checkpoint.checkpoint_every import SaveInterval
from psrpc.core.batch import batches_per_epoch
from psrpc.core.document import flag, maybe, real, record, text, whole
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, VariableSpec
from psrpc.core.policy import Mode, Policy
from psrpc.core.tables import FULL_EVERY, TableSpec
from psrpc.core.text import counted

FORMAT = 1
"""Format version of the JSON. Load-bearing."""
Engine = Literal["keras", "numpy"]
WireDtype = Literal["float32", "bfloat16", "float16"]
ScaleLr = Literal["linear"]
Dense = Literal["shards", "allreduce"]
DENSE: tuple[Dense, ...] = get_args(Dense)


@dataclass(frozen=True)
class PolicyChange:
    """A job switches to ``policy`` after its first ``epoch`` epochs."""

    policy: Policy
    epoch: int


@dataclass(frozen=True, kw_only=True)
class DenseLayout:
    """What decides where a job's dense parameters may be.

    Attributes:
        dense: whether the dense parameters are in processes of their own, or in slices that workers
            host.
        slices: the number of slices, if the job says one.
        tables: the embedding tables.
        needs_single_shard: why the job's update needs all variables on one shard; None if it does
            not.
    """

    dense: Dense = "shards"
    slices: int | None = None
    tables: tuple[TableSpec, ...] = ()
    needs_single_shard: str | None = None

    @property
    def hosted(self) -> bool:
        """Whether workers host the dense parameters, as slices."""
        return self.dense == "allreduce"

    def dense_shards(self, shards: int) -> int:
        """Returns how many shards, of which ``--shards`` are ``shards``, have dense parameters."""
        if not self.hosted:
            return shards
        return self.slices or (1 if self.tables else max(1, shards))


@dataclass(frozen=True)
class JobDescription(DenseLayout):
    """A job as processes other than workers need it; see also :class:`DenseLayout`.

    Attributes:
        policy: the initial policy.
        optimizer: the serialized Keras optimizer.
        intra_op_threads: threads of an operation; 0 where TensorFlow chooses.
        document: the JSON that this description was read from.
        then: the rule to switch the policy.
        local_steps: H, the number of batches in one batch id.
        local_learning_rate: the learning rate of the workers' SGD in local steps; None under a
            schedule.
        warmup_epochs: length of the warmup of ``scale_lr``.
        rows_nbytes: bytes of the rows that a batch needs, roughly.
        first_rows: the checkpoint with the initial rows of the tables; empty for none.
        slots: the names of the optimizer's state in checkpoints; None if unknown.
        exact: whether each gradient of a round is pushed by itself, and no worker pushes a sum.
    """

    name: str
    job_sha256: str
    policy: Policy
    batch_size: int
    epochs: int
    seed: int
    train_records: int
    eval_records: int
    data_fingerprint: str
    variables: tuple[VariableSpec, ...]
    optimizer: dict[str, Any]
    engine: Engine
    placement: Placement
    checkpoint_every: SaveInterval
    keep_checkpoints: int
    keep_best: Objective | None
    intra_op_threads: int
    wire_dtype: WireDtype
    total_updates: int
    metrics: tuple[str, ...]
    document: dict[str, Any]
    then: PolicyChange | None = None
    local_steps: int = 1
    local_learning_rate: float | None = None
    scale_lr: ScaleLr | None = None
    warmup_epochs: float = 0.0
    rows_nbytes: int = 0
    prefetch_rows: bool = False
    first_rows: str = ""
    full_checkpoint_every: int = FULL_EVERY
    slots: tuple[str, ...] | None = None
    stop_early: StopEarly | None = None
    reduce_lr: ReduceLr | None = None
    evaluate_every_epoch: bool = False
    unsummed_metrics: tuple[str, ...] = ()
    exact: bool = True

    @property
    def paced(self) -> bool:
        """Whether an epoch begins only once the one before is evaluated."""
        follows = self.stop_early is not None or self.reduce_lr is not None
        return bool(self.eval_records) and (self.evaluate_every_epoch or follows)

    @property
    def remarks(self) -> list[str]:
        """Remarks for the user on how the job is done."""
        remarks = []
        if self.batch_size > self.train_records:
            remarks.append(
                f"batch_size is {self.batch_size}, and train holds "
                f"{counted(self.train_records, 'record')}: each epoch is one batch of all of them"
            )
        if self.unsummed_metrics:
            remarks.append(
                f"the states of {', '.join(self.unsummed_metrics)} do not add up over batches: the "
                "history has no value of training data, and one worker evaluates all records"
            )
        return remarks

    def plan(self, shards: int) -> Plan:
        """Returns the plan if ``--shards`` is ``shards``: with embedding tables and slices, so many
        shards have the rows, and the slices follow. Raises InvalidJob."""
        dense = self.dense_shards(shards)
        slices = dense if self.hosted and self.tables else 0
        total = shards + dense if slices else dense
        return make_plan(self.variables, total, self.placement, self.tables, slices)

    @property
    def mode(self) -> Mode:
        """The initial mode."""
        return self.policy.mode

    @property
    def replicas(self) -> int:
        """K, or 0 without rounds."""
        return self.policy.open

    @property
    def unit(self) -> int:
        """Records of a batch id, the unit of leases, pushes and counts."""
        return self.batch_size * self.local_steps

    @property
    def per_epoch(self) -> int:
        """Batch ids of an epoch."""
        return batches_per_epoch(self.train_records, self.unit)


_PLATEAU = {"metric": text, "lower": flag, "patience": whole(), "min_delta": real}
STOP_EARLY = maybe(record({**_PLATEAU, "restore_best": flag}))
REDUCE_LR = maybe(record({**_PLATEAU, "factor": real, "cooldown": whole(), "min_lr": real}))


def no_shard_belongs() -> InvalidArgument:
    """Returns the error of `pserver serve` for a job whose workers host all parameters."""
    return InvalidArgument(
        "dense is 'allreduce', so workers host the parameters and no `pserver serve` belongs to "
        "this job; start workers alone (launchers: --shards 0), or the coordinator with --set "
        "dense=shards"
    )


def check_for_shards(layout: DenseLayout, shards: int, workers: int | None = None) -> None:
    """Raises InvalidJob if the job's update cannot run on so many shards, or if ``workers``, where
    they are known, are too few to host them."""
    if shards < 1 and (layout.tables or not layout.hosted):
        what = "rows of embedding tables" if layout.hosted else "parameters"
        otherwise = "" if layout.tables else ", or have workers host them: dense=allreduce"
        raise InvalidJob(
            f"--shards is {shards}, and the {what} need a shard; say --shards 1{otherwise}",
            code="PS107",
        )
    dense = layout.dense_shards(shards)
    by_field = layout.hosted and (layout.slices is not None or bool(layout.tables))
    if by_field and not layout.tables and shards not in (0, 1, dense):
        raise InvalidJob(
            f"slices is {dense} and --shards is {shards}: without embedding tables both are the "
            "number of slices; leave one of them out",
            code="PS107",
        )
    flag, say = ("slices", "say slices=") if by_field else ("--shards", "say --shards ")
    if layout.hosted and workers is not None and workers < dense:
        raise InvalidJob(
            f"dense is 'allreduce' with {counted(dense, 'slice')} of the parameters ({flag}), "
            f"and {counted(workers, 'worker')} to host them, one each; {say}{workers}",
            code="PS107",
        )
    if dense > 1 and layout.needs_single_shard:
        raise InvalidJob(
            f"this job cannot use {dense} {'slices' if layout.hosted else 'shards'}: "
            f"{layout.needs_single_shard}; {say}1",
            code="PS107",
        )
