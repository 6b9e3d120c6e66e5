"""What the coordinator knows of a job: the JSON that ``worker describe`` prints.

User code and TensorFlow run in that child process, never in the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from coordinator.core.retention import Objective, ReduceLr, StopEarly
from psrpc.core.batch import batches_per_epoch
from psrpc.core.checkpoint_every import SaveInterval, read_checkpoint_every
from psrpc.core.document import (
    Check,
    anything,
    flag,
    listed,
    maybe,
    parse_json,
    real,
    record,
    shown,
    text,
    whole,
)
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Placement, VariableSpec
from psrpc.core.policy import Mode, Policy
from psrpc.core.tables import FULL_EVERY, TableSpec
from psrpc.core.tensor_form import variable
from psrpc.core.text import counted

FORMAT = 1
"""Of the JSON. Load-bearing."""


Engine = Literal["keras", "numpy"]
WireDtype = Literal["float32", "bfloat16", "float16"]
ScaleLr = Literal["linear"]


@dataclass(frozen=True)
class Rule:
    """A job goes over to ``policy`` once its first ``epoch`` epochs are done."""

    policy: Policy
    epoch: int


@dataclass(frozen=True)
class JobDescription:
    """A job, as far as anyone but a worker needs to know it. ``policy`` is what it begins with,
    ``then`` what it goes over to by itself; ``local_steps`` (H) are the batches of one batch id,
    ``local_learning_rate`` is that of the workers' SGD then, None where a schedule says it;
    ``tables`` are the embedding tables, ``first_rows`` the checkpoint whose rows they begin with
    (empty: none), and ``rows_nbytes`` about the bytes of their rows that a batch needs;
    ``warmup_epochs`` is for ``scale_lr``; ``intra_op_threads`` is 0 where TensorFlow is to choose;
    ``optimizer`` is the serialized Keras optimizer and ``slots`` what its state is called in
    checkpoints, None where that is not said; ``document`` the JSON it was read from."""

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
    needs_single_shard: str | None
    checkpoint_every: SaveInterval
    keep_checkpoints: int
    keep_best: Objective | None
    intra_op_threads: int
    wire_dtype: WireDtype
    total_updates: int
    metrics: tuple[str, ...]
    document: dict[str, Any]
    then: Rule | None = None
    local_steps: int = 1
    local_learning_rate: float | None = None
    scale_lr: ScaleLr | None = None
    warmup_epochs: float = 0.0
    tables: tuple[TableSpec, ...] = ()
    rows_nbytes: int = 0
    first_rows: str = ""
    full_checkpoint_every: int = FULL_EVERY
    slots: tuple[str, ...] | None = None
    stop_early: StopEarly | None = None
    reduce_lr: ReduceLr | None = None
    evaluate_every_epoch: bool = False
    unsummed_metrics: tuple[str, ...] = ()

    @property
    def paced(self) -> bool:
        """Whether an epoch begins once the one before is evaluated."""
        follows = self.stop_early is not None or self.reduce_lr is not None
        return bool(self.eval_records) and (self.evaluate_every_epoch or follows)

    @property
    def remarks(self) -> list[str]:
        """What a person should know of how the job is done."""
        found = []
        if self.batch_size > self.train_records:
            found.append(
                f"batch_size is {self.batch_size}, and train holds "
                f"{counted(self.train_records, 'record')}: each epoch is one batch of all of them"
            )
        if self.unsummed_metrics:
            found.append(
                f"the states of {', '.join(self.unsummed_metrics)} do not add up over batches: the "
                "history has no value of training data, and one worker evaluates all records"
            )
        return found

    @property
    def mode(self) -> Mode:
        """The mode that the job begins with."""
        return self.policy.mode

    @property
    def replicas(self) -> int:
        """K, or 0 without rounds."""
        return self.policy.open

    @property
    def unit(self) -> int:
        """Records of a batch id, which is what is leased, pushed and counted."""
        return self.batch_size * self.local_steps

    @property
    def per_epoch(self) -> int:
        """Batch ids of an epoch."""
        return batches_per_epoch(self.train_records, self.unit)


def parse_description(said: str) -> JobDescription:
    """Reads and checks the JSON.

    Raises:
        InvalidJob: not such a description; names the field.
    """
    try:
        document = parse_json(said.encode())
    except ValueError as error:
        raise InvalidJob(
            f"`worker describe` printed {said[:200]!r}, which is not JSON: {error}"
        ) from None
    return read_description(document)


def read_description(document: Any) -> JobDescription:
    """The description in a JSON value, such as one that was kept. Raises InvalidJob."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidJob(f"the job's description is not of format {FORMAT}; same version of both?")
    read = _Reader(document)
    epochs = read.whole("epochs", 1)
    return JobDescription(
        name=read.text("name"),
        job_sha256=read.text("job_sha256"),
        policy=Policy.from_json(read.field("policy", dict)),
        batch_size=read.whole("batch_size", 1),
        epochs=epochs,
        seed=read.whole("seed", 0),
        train_records=read.whole("train_records", 1),
        eval_records=read.whole("eval_records", 0),
        data_fingerprint=read.text("data_fingerprint"),
        variables=tuple(_variable(v) for v in read.field("variables", list)),
        optimizer=read.field("optimizer", dict),
        engine=read.choice("engine", get_args(Engine)),
        placement=read.choice("placement", get_args(Placement)),
        needs_single_shard=read.checked("needs_single_shard", maybe(text)),
        checkpoint_every=_interval(document.get("checkpoint_every")),
        keep_checkpoints=read.whole("keep_checkpoints", 1),
        keep_best=_objective(document.get("keep_best")),
        intra_op_threads=read.checked("intra_op_threads", maybe(whole())) or 0,
        wire_dtype=read.choice("wire_dtype", get_args(WireDtype)),
        total_updates=read.whole("total_updates", 1),
        metrics=tuple(read.checked("metrics", listed(text))),
        document=document,
        then=_rule(document.get("then"), epochs),
        local_steps=read.whole("local_steps", 1, absent=1),
        local_learning_rate=read.checked("local_learning_rate", maybe(real)),
        full_checkpoint_every=read.whole("full_checkpoint_every", 1, absent=FULL_EVERY),
        scale_lr=read.choice("scale_lr", get_args(ScaleLr), absent=True),
        warmup_epochs=read.positive("warmup_epochs"),
        tables=tuple(map(_table, read.checked("tables", maybe(listed(anything))) or ())),
        rows_nbytes=read.whole("rows_nbytes", 0, absent=0),
        first_rows=read.checked("first_rows", maybe(text)) or "",
        stop_early=_stop_early(document.get("stop_early")),
        reduce_lr=_reduce_lr(document.get("reduce_lr")),
        unsummed_metrics=tuple(read.checked("unsummed_metrics", maybe(listed(text))) or ()),
        evaluate_every_epoch=read.checked("evaluate_every_epoch", maybe(flag)) or False,
        slots=None if document.get("slots") is None else tuple(read.checked("slots", listed(text))),
    )


class _Reader:
    """Takes fields out of a JSON object and says which one is wrong."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def field(self, name: str, kind: type[Any]) -> Any:
        value = self._document.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidJob(
                f"the job's description has {name} = {value!r}; expected {kind.__name__}"
            )
        return value

    def checked(self, name: str, check: Check) -> Any:
        try:
            return check(self._document.get(name), name)
        except ValueError as error:
            raise InvalidJob(f"the job's description is wrong: {error}") from None

    def text(self, name: str) -> str:
        return str(self.field(name, str))

    def whole(self, name: str, least: int, absent: int | None = None) -> int:
        if absent is not None and self._document.get(name) is None:
            return absent
        value = int(self.field(name, int))
        if value < least:
            raise InvalidJob(
                f"the job's description has {name} = {value}; expected at least {least}"
            )
        return value

    def positive(self, name: str) -> float:
        """A number of at least 0, which is what it is where nothing is said."""
        value = self._document.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InvalidJob(
                f"the job's description has {name} = {value!r}; expected a number of at least 0"
            )
        return float(value)

    def choice(self, name: str, choices: Sequence[str], absent: bool = False) -> Any:
        if absent and self._document.get(name) is None:
            return None
        value = self.field(name, str)
        if value not in choices:
            raise InvalidJob(
                f"the job's description has {name} = {value!r}; expected {' or '.join(choices)}"
            )
        return value


def _rule(document: Any, epochs: int) -> Rule | None:
    if document is None:
        return None
    try:
        policy, epoch = Policy.from_json(document["policy"]), document["epoch"]
    except (KeyError, TypeError, AttributeError):
        raise InvalidJob(f"the job's description has then = {document!r}") from None
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 < epoch < epochs:
        raise InvalidJob(
            f"the job's rule is to follow {policy} after epoch {epoch!r}; expected a whole number "
            f"of at least 1 and below its {counted(epochs, 'epoch')}"
        )
    return Rule(policy, epoch)


def _interval(value: Any) -> SaveInterval:
    try:
        return read_checkpoint_every(value)
    except ValueError as error:
        raise InvalidJob(f"the job's description has checkpoint_every = {error}") from None


def _objective(document: Any) -> Objective | None:
    if document is None:
        return None
    try:
        return Objective(str(document["metric"]), bool(document["lower"]))
    except (KeyError, TypeError):
        raise InvalidJob(f"the job's description has keep_best = {document!r}") from None


_PLATEAU = {"metric": text, "lower": flag, "patience": whole(), "min_delta": real}
_STOP_EARLY = maybe(record({**_PLATEAU, "restore_best": flag}))
_REDUCE_LR = maybe(record({**_PLATEAU, "factor": real, "cooldown": whole(), "min_lr": real}))


def _stop_early(document: Any) -> StopEarly | None:
    found = _read_plateau(_STOP_EARLY, document, "stop_early")
    return None if found is None else StopEarly(**found)


def _reduce_lr(document: Any) -> ReduceLr | None:
    found = _read_plateau(_REDUCE_LR, document, "reduce_lr")
    return None if found is None else ReduceLr(**found)


def _read_plateau(check: Check, document: Any, name: str) -> dict[str, Any] | None:
    try:
        found = check(document, name)
    except ValueError as error:
        raise InvalidJob(f"the job's description is wrong: {error}") from None
    if found is None:
        return None
    objective = Objective(found["metric"], found["lower"])
    rest = {key: value for key, value in found.items() if key not in ("metric", "lower")}
    return {"objective": objective, **rest}


def _variable(document: Any) -> VariableSpec:
    try:
        found = variable(document, "")
    except ValueError as error:
        raise InvalidJob(
            f"the job's description has the variable {shown(document)}: {error}"
        ) from None
    return VariableSpec(**(found | {"shape": tuple(found["shape"])}))


def _table(document: Any) -> TableSpec:
    try:
        return TableSpec.from_json(document)
    except ValueError as error:
        raise InvalidJob(
            f"the job's description has the table {shown(document)}: {error}"
        ) from None


def check_for_shards(description: JobDescription, shards: int) -> None:
    """Raises InvalidJob if the job's update cannot run on so many shards."""
    if shards > 1 and description.needs_single_shard:
        raise InvalidJob(
            f"this job cannot use {shards} shards: {description.needs_single_shard}; "
            "say --shards 1",
            code="PS107",
        )
