"""``--set key=value``: changes a job without a change of its file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pserver.updates.allowlist import with_learning_rate
from psrpc.checkpoint.checkpoint_every import EXPECTED, read_checkpoint_every
from psrpc.core.errors import InvalidSetting
from psrpc.core.policy import MODES
from psrpc.options.job_keys import unknown_key
from worker.job.job import Job
from worker.job.phases import without_effect

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class _Kind:
    """The parser of a value, and its description in an error."""

    expected: str
    parse: Callable[[str], Any]


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return () if text.lower() == "none" else tuple(_name(name) for name in text.split(","))


def _or_none(kind: _Kind) -> _Kind:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind.parse(text)

    return _Kind(f"{kind.expected} or none", parse)


def _checkpoint_every(text: str) -> int | str:
    every = int(text) if text.lstrip("+-").isdecimal() else text
    read_checkpoint_every(every)
    return every


_INTEGER = _Kind("a whole number", int)
_FLOAT = _Kind("a finite number", _number)
_BOOLEAN = _Kind("true or false", _boolean)
_NAME = _Kind("a name", _name)
_PATH = _Kind("a path", _name)

FIELDS: dict[str, _Kind | None] = {
    "model": None,
    "loss": _or_none(_NAME),
    "loss_weights": None,
    "optimizer": _or_none(_NAME),
    "train": None,
    "eval": _Kind("none (data can only be switched off here)", _none),
    "metrics": _Kind("names of metrics with commas between them, or none", _names),
    "class_weight": None,
    "batch_size": _INTEGER,
    "epochs": _INTEGER,
    "mode": _NAME,
    "replicas": _or_none(_INTEGER),
    "aggregate": _or_none(_INTEGER),
    "speculate": _BOOLEAN,
    "round_deadline_s": _or_none(_FLOAT),
    "balance": _BOOLEAN,
    "staleness": _or_none(_INTEGER),
    "max_staleness": _or_none(_INTEGER),
    "staleness_lr": _or_none(_NAME),
    "delay_compensation": _or_none(_NAME),
    "dc_lambda": _or_none(_FLOAT),
    "dc_decay": _FLOAT,
    "then": _or_none(_NAME),
    "then_after": _or_none(_INTEGER),
    "local_steps": _INTEGER,
    "scale_lr": _or_none(_NAME),
    "warmup_epochs": _FLOAT,
    "prefetch_rows": _BOOLEAN,
    "seed": _INTEGER,
    "init_from": _or_none(_PATH),
    "engine": _NAME,
    "checkpoint_every": _or_none(_Kind(EXPECTED, _checkpoint_every)),
    "full_checkpoint_every": _INTEGER,
    "keep_checkpoints": _INTEGER,
    "keep_best": _or_none(_NAME),
    "evaluate_every_epoch": _BOOLEAN,
    "stop_early": _or_none(_NAME),
    "reduce_lr": _or_none(_NAME),
    "intra_op_threads": _or_none(_INTEGER),
    "devices": _or_none(_NAME),
    "sum_devices": _BOOLEAN,
    "exact": _BOOLEAN,
    "soft_placement": _BOOLEAN,
    "dense": _NAME,
    "slices": _or_none(_INTEGER),
    "wire_dtype": _NAME,
    "compression": _or_none(_NAME),
    "topk": _FLOAT,
}
"""Every field of a job; None marks those that text cannot express."""

_OPTIONAL = frozenset(
    {
        *("clipnorm", "clipvalue", "ema_overwrite_frequency", "global_clipnorm"),
        *("gradient_accumulation_steps", "weight_decay"),
    }
)
"""Arguments of Keras optimizers that None switches off."""


def override_job(
    job: Job, settings: Iterable[str], asked: Collection[str] = (), unread: Collection[str] = ()
) -> tuple[Job, dict[str, str]]:
    """Applies ``key=value`` settings to a job; the last setting of a key wins. A change of mode
    resets the fields that only fit the job's own mode, see ``worker.job.phases``.

    Args:
        asked: settings that the job file read itself (``worker.job.loader``); skipped here.
        unread: settings that the job file mentions but did not read.

    Returns:
        The job, and the settings ``optimizer.*`` as text, for :func:`override_optimizer`.

    Raises:
        InvalidJob: no ``=``, an unknown key (names the nearest known one), or a value that cannot
            be read or that the job refuses.
    """
    fields: dict[str, Any] = {}
    arguments: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not key:
            raise InvalidSetting(
                f"--set {setting}: expected key=value, for example epochs=3", code="PS104"
            )
        if key.startswith(OPTIMIZER_PREFIX):
            arguments[key.removeprefix(OPTIMIZER_PREFIX)] = text
            continue
        if key in asked:
            continue
        if key not in FIELDS and key in unread:
            raise InvalidSetting(
                f"--set {setting}: setting({key!r}) is not read while the job file is loaded; read "
                "it at the top of the file",
                code="PS104",
            )
        if key not in FIELDS:
            settable = [name for name, kind in FIELDS.items() if kind]
            raise unknown_key(
                setting, key, [*sorted(asked), *settable, OPTIMIZER_PREFIX + "learning_rate"]
            )
        kind = FIELDS[key]
        if kind is None:
            raise InvalidSetting(f"--set {setting}: {key} is code; change it in the job file")
        fields[key] = parsed(setting, kind, text)
    mode = fields.get("mode", job.mode)
    if mode != job.mode and mode in MODES:
        fields = without_effect(job, mode, fields) | fields
    return replace(job, **fields), arguments


def check_rounds(job: Job, settings: Iterable[str]) -> None:
    """Refuses ``replicas`` in ``settings`` if ``job``, with them applied, trains without rounds.

    Only for the start of a run: the file may have ``replicas`` for a mode that is not used, and the
    settings that identify a run do not include the mode.

    Raises:
        InvalidJob: names the mode and the fix.
    """
    asked = any(setting.partition("=")[0].strip() == "replicas" for setting in settings)
    if asked and job.replicas is not None and "sync" not in (job.mode, job.then):
        raise InvalidSetting(
            f"replicas is {job.replicas}, and the job trains in mode {job.mode}, which has no "
            "rounds: add --mode sync, or leave --replicas out"
        )


def override_optimizer(
    serialized: Mapping[str, Any], arguments: Mapping[str, str]
) -> dict[str, Any]:
    """Replaces plain arguments of a serialized optimizer (``keras.optimizers.serialize``).

    ``learning_rate`` replaces the initial value of a schedule and keeps its shape.

    Raises:
        InvalidJob: the optimizer lacks the argument, or cannot take the value.
    """
    changed = copy.deepcopy(dict(serialized))
    config = changed["config"]
    for argument, text in arguments.items():
        setting = f"{OPTIMIZER_PREFIX}{argument}={text}"
        if argument == "learning_rate":
            changed = with_learning_rate(changed, parsed(setting, _FLOAT, text))
            config = changed["config"]
            continue
        if argument not in config:
            raise unknown_key(
                setting, OPTIMIZER_PREFIX + argument, [OPTIMIZER_PREFIX + key for key in config]
            )
        kind = kind_of(config[argument])
        config[argument] = parsed(setting, _or_none(kind) if argument in _OPTIONAL else kind, text)
    return changed


def kind_of(value: Any) -> _Kind:
    """Returns the kind of text that may replace ``value``."""
    if isinstance(value, bool):
        return _BOOLEAN
    if isinstance(value, int):
        return _INTEGER
    if isinstance(value, str):
        return _NAME
    return _FLOAT


def parsed(setting: str, kind: _Kind, text: str) -> Any:
    """Parses ``text``; raises an InvalidJob that names the ``setting`` if that fails."""
    try:
        return kind.parse(text)
    except (ValueError, KeyError):
        raise InvalidSetting(
            f"--set {setting}: {text!r} cannot be read; expected {kind.expected}"
        ) from None
