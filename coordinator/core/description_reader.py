"""Reads the JSON that ``worker describe`` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

from coordinator.core.description import (
    FORMAT,
    REDUCE_LR,
    STOP_EARLY,
    Dense,
    Engine,
    JobDescription,
    PolicyChange,
    ScaleLr,
    WireDtype,
)
from coordinator.core.plateau import ReduceLr, StopEarly
from coordinator.core.retention import Objective
from psrpc.checkpoint.checkpoint_every import SaveInterval, read_checkpoint_every
from psrpc.core.document import (
    Check,
    anything,
    flag,
    listed,
    maybe,
    parse_json,
    real,
    shown,
    text,
    whole,
)
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Placement, VariableSpec
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY, TableSpec
from psrpc.core.tensor_form import variable
from psrpc.core.text import counted

_Kind = TypeVar("_Kind")


def parse_description(said: str) -> JobDescription:
    """Parses and checks the JSON.

    Raises:
        InvalidJob: the text is no such description; the message names the field.
    """
    try:
        document = parse_json(said.encode())
    except ValueError as error:
        raise InvalidJob(
            f"`worker describe` printed {said[:200]!r}, which is not JSON: {error}"
        ) from None
    return read_description(document)


def read_description(document: Any) -> JobDescription:
    """Reads the description from a JSON value, such as a stored one. Raises InvalidJob."""
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
        prefetch_rows=read.checked("prefetch_rows", maybe(flag)) or False,
        first_rows=read.checked("first_rows", maybe(text)) or "",
        stop_early=_on_plateau(StopEarly, read.checked("stop_early", STOP_EARLY)),
        reduce_lr=_on_plateau(ReduceLr, read.checked("reduce_lr", REDUCE_LR)),
        unsummed_metrics=tuple(read.checked("unsummed_metrics", maybe(listed(text))) or ()),
        evaluate_every_epoch=read.checked("evaluate_every_epoch", maybe(flag)) or False,
        exact=read.checked("exact", maybe(flag)) is not False,
        dense=read.choice("dense", get_args(Dense), absent=True) or "shards",
        slices=read.checked("slices", maybe(whole(1))),
        slots=None if document.get("slots") is None else tuple(read.checked("slots", listed(text))),
    )


class _Reader:
    """Takes fields out of a JSON object; errors name the wrong one."""

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
        """Reads a number of at least 0, the default."""
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


def _rule(document: Any, epochs: int) -> PolicyChange | None:
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
    return PolicyChange(policy, epoch)


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


def _on_plateau(kind: Callable[..., _Kind], values: dict[str, Any] | None) -> _Kind | None:
    """Makes a ``kind``, StopEarly or ReduceLr, of its checked fields."""
    if values is None:
        return None
    rest = {key: value for key, value in values.items() if key not in ("metric", "lower")}
    return kind(Objective(values["metric"], values["lower"]), **rest)


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
