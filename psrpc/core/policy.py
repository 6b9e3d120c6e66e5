"""The consistency policy: when shards may apply a gradient, and how old it may be.

Job, coordinator and shards share these settings, so this module checks them for all three. A policy
is an immutable value. The number of a policy, which rises with each change, is stored elsewhere
(``Fence.policy``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from psrpc.core.errors import InvalidSetting

Mode = Literal["async", "sync", "ssp"]
StalenessLr = Literal["inverse"]
DelayCompensation = Literal["constant", "adaptive"]

MODES: tuple[Mode, ...] = ("async", "sync", "ssp")

LAMBDA: Mapping[str, float] = {"constant": 0.04, "adaptive": 2.0}
"""Default λ of DC-ASGD-c and DC-ASGD-a, from Zheng et al. 2017, section 6.1."""

_FITS: Mapping[str, tuple[Mode, ...]] = {
    "replicas": ("sync",),
    "aggregate": ("sync",),
    "speculate": ("sync",),
    "round_deadline_s": ("sync",),
    "balance": ("sync",),
    "staleness": ("ssp",),
    "max_staleness": ("async",),
    "staleness_lr": ("async", "ssp"),
    "delay_compensation": ("async", "ssp"),
    "dc_lambda": ("async", "ssp"),
    "dc_decay": ("async", "ssp"),
}
"""Setting -> the modes that have it."""

_WHY: Mapping[str, str] = {
    "replicas": "only rounds are made of so many micro-batches",
    "aggregate": "only rounds are decided by the first of their micro-batches",
    "speculate": "only rounds wait for a straggler",
    "round_deadline_s": "there are no rounds",
    "balance": "no worker waits for another, so slow ones simply do fewer batches",
    "staleness": "only ssp has clocks; in async mode bound it with max_staleness",
    "max_staleness": "sync has no stale gradients, and ssp bounds clocks with staleness",
    "staleness_lr": "gradients of a round are not stale",
    "delay_compensation": "gradients of a round are not stale",
    "dc_lambda": "gradients of a round are not stale",
    "dc_decay": "gradients of a round are not stale",
}


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise InvalidSetting(f"{name} is {value!r}; expected {' or '.join(map(str, choices))}")


def _whole(name: str, value: object, least: int) -> None:
    # bool is a subclass of int.
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(f"{name} is {value!r}; expected a whole number of at least {least}")


def _real(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
) -> None:
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (above < value < below and value >= least)
    ):
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("above", above), ("of at least", least), ("below", below))
            if math.isfinite(bound)
        ]
        raise InvalidSetting(f"{name} is {value!r}; expected a number {' and '.join(bounds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules that turn the gradients of several workers into one sequence of updates.

    Attributes:
        mode: ``async`` applies every gradient on arrival. ``sync`` applies the mean of a round of
            micro-batches. ``ssp`` (stale synchronous parallel, Ho et al. 2013) applies every
            gradient on arrival, but lets no worker run more than ``staleness`` steps ahead of the
            slowest.
        replicas: K, the number of micro-batches that are open at the same time in a round (sync).
        aggregate: M, the number of micro-batches that a round takes: those committed first. The
            others are used in a later round (backup workers, Chen et al. 2016). None takes all K
            (sync).
        speculate: whether an idle worker repeats the micro-batch of a late worker; the first commit
            is used (sync).
        round_deadline_s: time after which the coordinator reports the late workers of a round
            (sync).
        balance: whether to size micro-batches by the speed of their workers; the number of records
            in a round stays the same (sync).
        staleness: s, the number of steps that a worker may be ahead of the slowest; 0 makes all
            wait after each step (ssp).
        max_staleness: maximum number of updates since the parameters of a gradient. Shards refuse
            staler gradients, and their batch is leased again (async).
        staleness_lr: ``inverse`` divides the learning rate by 1 + staleness (Zhang et al. 2016,
            "Staleness-aware Async-SGD", section 3.2) (async, ssp).
        delay_compensation: corrects a gradient for the updates since its parameters were pulled
            (Zheng et al. 2017, "Asynchronous SGD with Delay Compensation"): ``constant`` is
            DC-ASGD-c, ``adaptive`` DC-ASGD-a (async, ssp).
        dc_lambda: λ of the correction; None for the value in the paper.
        dc_decay: m, the memory of the mean square in DC-ASGD-a; 0 ≤ m < 1.

    Raises:
        InvalidSetting: a value is out of range, or a setting does not fit the mode; says why.
    """

    mode: Mode = "async"
    replicas: int | None = None
    aggregate: int | None = None
    speculate: bool = False
    round_deadline_s: float | None = None
    balance: bool = False
    staleness: int | None = None
    max_staleness: int | None = None
    staleness_lr: StalenessLr | None = None
    delay_compensation: DelayCompensation | None = None
    dc_lambda: float | None = None
    dc_decay: float = 0.95

    def __post_init__(self) -> None:
        _choice("mode", self.mode, MODES)
        _whole("replicas", self.replicas, 1)
        _whole("aggregate", self.aggregate, 1)
        _whole("staleness", self.staleness, 0)
        _whole("max_staleness", self.max_staleness, 0)
        _choice("staleness_lr", self.staleness_lr, ("inverse", None))
        _choice("delay_compensation", self.delay_compensation, ("constant", "adaptive", None))
        for name in ("speculate", "balance"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSetting(f"{name} is {getattr(self, name)!r}; expected true or false")
        _real("round_deadline_s", self.round_deadline_s, above=0.0)
        _real("dc_lambda", self.dc_lambda, above=0.0)
        _real("dc_decay", self.dc_decay, least=0.0, below=1.0)
        for name in self.changed():
            if self.mode not in _FITS.get(name, MODES):
                fits = " or ".join(_FITS[name])
                raise InvalidSetting(
                    f"{name} is for mode {fits}, but mode is {self.mode!r}: {_WHY[name]}"
                )
        self._check_together()

    def _check_together(self) -> None:
        if self.mode == "sync" and self.replicas is None:
            raise InvalidSetting(
                "mode is 'sync' but replicas is not set; say how many micro-batches make a round: "
                "Job(replicas=3), --replicas 3 or coordinator set mode=sync replicas=3"
            )
        if self.mode == "ssp" and self.staleness is None:
            raise InvalidSetting(
                "mode is 'ssp' but staleness is not set; say how many steps a worker may be ahead "
                "of the slowest: staleness=4 in Job(...) or Cluster(...), --set staleness=4 or "
                "coordinator set mode=ssp staleness=4"
            )
        if self.aggregate is not None:
            if self.aggregate > (self.replicas or 0):
                raise InvalidSetting(
                    f"aggregate is {self.aggregate}, but a round has only {self.replicas} "
                    "micro-batches (replicas); it cannot take more than are open"
                )
            for name in ("speculate", "balance"):
                if getattr(self, name):
                    raise InvalidSetting(
                        f"{name} and aggregate exclude each other: a round that takes its first "
                        "micro-batches waits for no straggler"
                    )
        if self.delay_compensation is None and self.dc_lambda is not None:
            raise InvalidSetting(
                "dc_lambda is set, but delay_compensation is not; nothing is corrected"
            )
        if self.delay_compensation != "adaptive" and self.dc_decay != 0.95:
            raise InvalidSetting("dc_decay is for delay_compensation 'adaptive' alone")

    @property
    def rounds(self) -> bool:
        """Whether shards apply gradients in rounds."""
        return self.mode == "sync"

    @property
    def open(self) -> int:
        """K, the number of micro-batches open at the same time; 0 without rounds."""
        return self.replicas or 0

    @property
    def taken(self) -> int:
        """Number of micro-batches in one update: ``aggregate`` if set, else ``replicas``; 1 without
        rounds."""
        return self.aggregate or self.replicas or 1

    @property
    def backups(self) -> bool:
        """Whether a round leaves some micro-batches for a later round, so that their gradients are
        of older parameters."""
        return self.rounds and self.taken < self.open

    @property
    def compensation(self) -> float:
        """λ of the delay compensation."""
        if self.dc_lambda is not None:
            return self.dc_lambda
        return LAMBDA.get(self.delay_compensation or "", 0.0)

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults, without ``mode``."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "mode" and getattr(self, field.name) != field.default
        }

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {"mode": self.mode, **self.changed()}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Policy:
        """The inverse of :meth:`to_json`. Raises InvalidSetting, which names the setting."""
        unknown = set(document) - set(SETTINGS)
        if unknown:
            raise InvalidSetting(f"a policy has no {', '.join(sorted(unknown))}")
        return Policy(**document)

    def __str__(self) -> str:
        """Formats the policy like ``sync replicas=3``."""
        return " ".join([self.mode, *(f"{k}={_shown(v)}" for k, v in self.changed().items())])


def check_prefetch(policy: Policy) -> None:
    """Checks that a job with ``prefetch_rows`` can have ``policy``. Raises InvalidSetting if
    not."""
    if policy.max_staleness == 0:
        raise InvalidSetting(
            "prefetch_rows receives rows before the last update, and max_staleness is 0: every "
            "second batch would be refused and computed again; expected max_staleness of 1 or more"
        )


def check_dense(dense: str, mode: Mode) -> None:
    """Checks that a job whose parameters are where ``dense`` says can have ``mode``. Raises
    InvalidSetting if not."""
    if dense == "allreduce" and mode != "sync":
        raise InvalidSetting(
            f"dense is 'allreduce', which is for mode sync, but mode is {mode!r}: workers "
            "exchange gradients round by round; say mode='sync' with replicas, or dense='shards'"
        )


def check_exact(exact: bool, policy: Policy) -> None:
    """Checks that a job, ``exact`` or not, can have ``policy``. Raises InvalidSetting if not."""
    for name in ("aggregate", "speculate", "balance"):
        value = getattr(policy, name)
        if value and not exact:
            raise InvalidSetting(
                f"exact=False and {name}={value} exclude each other: a worker sums its gradients "
                f"of rounds that are decided ahead, and with {name} none is; leave one of them out"
            )


ASYNC = Policy()
"""Applies every gradient on arrival."""

SETTINGS: tuple[str, ...] = tuple(field.name for field in fields(Policy))
"""Names of all settings: fields of a job, and keys of ``coordinator set``."""


def fitting(mode: Mode, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``settings`` that fit ``mode``."""
    return {k: v for k, v in settings.items() if mode in _FITS.get(k, MODES)}
