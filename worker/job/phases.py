"""The consistency policies of a job: the first one, and the one that ``then`` switches to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Protocol

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.core.policy import (
    SETTINGS,
    Mode,
    Policy,
    check_dense,
    check_exact,
    check_prefetch,
    fitting,
)


class PolicyFields(Protocol):
    """The fields of :class:`worker.job.job.Job` that phases depend on, besides :data:`SETTINGS`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def mode(self) -> Mode: ...
    @property
    def epochs(self) -> int: ...
    @property
    def then(self) -> Mode | None: ...
    @property
    def then_after(self) -> int | None: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def scale_lr(self) -> object: ...
    @property
    def warmup_epochs(self) -> float: ...
    @property
    def prefetch_rows(self) -> bool: ...
    @property
    def sum_devices(self) -> bool: ...
    @property
    def exact(self) -> bool: ...
    @property
    def compression(self) -> str | None: ...
    @property
    def dense(self) -> str: ...
    @property
    def slices(self) -> int | None: ...
    @property
    def engine(self) -> str: ...
    @property
    def devices(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Phases:
    """``first`` for ``first_epochs`` epochs, then ``then``. Without a rule ``then`` is None and
    ``first_epochs`` are all epochs of the job."""

    first: Policy
    first_epochs: int
    then: Policy | None


def phases_of(job: PolicyFields) -> Phases:
    """Returns the policies of ``job``. With a rule (``then``), a setting applies to all phases that
    it fits.

    Raises:
        InvalidJob: settings fit no phase, or not each other; says why.
    """
    settings = {name: getattr(job, name) for name in SETTINGS if name != "mode"}
    modes = _modes(job)
    for name, value in _changed(job, settings).items():
        # A job with replicas may run in a mode without rounds.
        if name != "replicas" and not any(fitting(mode, {name: value}) for mode in modes):
            _refuse(job, name, value)
    policies = [Policy(mode=mode, **fitting(mode, settings)) for mode in modes]
    _check_local_steps(job, policies)
    _check_rate(job, policies)
    _check_prefetch(job, policies)
    _check_sum(job, policies)
    _check_exact(job, policies)
    _check_dense(job, policies)
    if len(policies) == 1:
        return Phases(policies[0], job.epochs, None)
    assert job.then_after is not None  # checked by _modes
    return Phases(policies[0], job.then_after, policies[1])


def without_effect(job: PolicyFields, mode: Mode, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields to reset for a run in ``mode`` with the fields ``given``, and their
    defaults: those that only fit the mode of the job file. They include its rule, which begins with
    that mode."""
    modes: tuple[Mode, ...] = (mode, given["then"]) if given.get("then") else (mode,)
    names = {"then", "then_after"} | {
        name for name in SETTINGS if not any(fitting(each, {name: 0}) for each in modes)
    }
    if "sync" not in modes:
        names |= {"scale_lr", "warmup_epochs", "exact"}
    if set(modes) == {"sync"}:
        names.add("prefetch_rows")
    if "async" not in modes:
        names.add("sum_devices")
    # Replicas have no effect, and a later change to sync may need them.
    names -= {"mode", "replicas"}
    return {name: default for name, default in _defaults(job).items() if name in names}


def _modes(job: PolicyFields) -> tuple[Mode, ...]:
    """Returns the modes of the phases, in order.

    Raises:
        InvalidJob: a rule is incomplete, changes nothing, or never takes effect.
    """
    if job.then is None:
        if job.then_after is not None:
            raise InvalidSetting(
                f"then_after is {job.then_after}, but then is not set; say the mode that follows: "
                "Job(then='async', then_after=3)"
            )
        return (job.mode,)
    if job.then_after is None:
        raise InvalidSetting(
            f"then is {job.then!r}, but then_after is not set; say after how many epochs: "
            f"Job(then={job.then!r}, then_after=3)"
        )
    if job.then == job.mode:
        raise InvalidSetting(f"then is {job.then!r}, and so is mode; the rule would change nothing")
    if job.then_after >= job.epochs:
        raise InvalidSetting(
            f"then_after is {job.then_after}, but the job has {job.epochs} "
            f"epoch{'s' * (job.epochs > 1)}: the first phase never ends, and mode {job.then!r} "
            "never begins; make then_after less than epochs"
        )
    return (job.mode, job.then)


def _check_local_steps(job: PolicyFields, policies: list[Policy]) -> None:
    if job.local_steps == 1:
        return
    if any(policy.balance for policy in policies):
        raise InvalidSetting(
            "balance and local_steps exclude each other: the batches of local steps have "
            "batch_size records on every worker"
        )
    if any(policy.delay_compensation for policy in policies):
        raise InvalidSetting(
            "delay_compensation and local_steps exclude each other: it corrects gradients, and "
            "what local steps push is a difference of parameters"
        )
    if job.scale_lr is not None:
        raise InvalidSetting(
            "scale_lr and local_steps exclude each other: the learning rate of local steps is the "
            "worker's own, and what shards scale would be the mean of the differences; choose the "
            "optimizer's learning_rate by hand"
        )


def _check_rate(job: PolicyFields, policies: list[Policy]) -> None:
    if job.scale_lr is None:
        if job.warmup_epochs:
            raise InvalidSetting(
                f"warmup_epochs is {job.warmup_epochs}, but scale_lr is not set; there is nothing "
                "to warm up to: Job(scale_lr='linear')"
            )
        return
    if not any(policy.rounds for policy in policies):
        raise InvalidSetting(
            f"scale_lr is {job.scale_lr!r}, but mode is {job.mode!r}: only rounds make one update "
            "of several micro-batches, so there is nothing to scale by"
        )


def _check_prefetch(job: PolicyFields, policies: list[Policy]) -> None:
    if not isinstance(job.prefetch_rows, bool):
        raise InvalidSetting(f"prefetch_rows is {job.prefetch_rows!r}; expected true or false")
    if job.prefetch_rows and all(policy.rounds for policy in policies):
        raise InvalidSetting(
            f"prefetch_rows is for mode async or ssp, but mode is {job.mode!r}: a round is "
            "computed from its own version of every row"
        )
    if job.prefetch_rows:
        for policy in policies:
            check_prefetch(policy)


def _check_sum(job: PolicyFields, policies: list[Policy]) -> None:
    if not isinstance(job.sum_devices, bool):
        raise InvalidSetting(f"sum_devices is {job.sum_devices!r}; expected true or false")
    if not job.sum_devices:
        return
    if all(policy.mode != "async" for policy in policies):
        raise InvalidSetting(
            f"sum_devices is for mode async, but mode is {job.mode!r}: in a round each micro-batch "
            "counts by itself, so that another worker can replace it"
        )
    if any(policy.delay_compensation for policy in policies):
        raise InvalidSetting(
            "sum_devices and delay_compensation exclude each other: it corrects each gradient by "
            "its own square; leave one of them out"
        )
    if job.compression is not None:
        raise InvalidSetting(
            "sum_devices and compression exclude each other: each device keeps what its own "
            "gradient left out; leave one of them out"
        )


def _check_exact(job: PolicyFields, policies: list[Policy]) -> None:
    if job.exact:
        return
    if not any(policy.rounds for policy in policies):
        raise InvalidSetting(
            f"exact=False is for mode sync, but mode is {job.mode!r}: without rounds the result "
            "depends on the order of gradients in any case; leave it out"
        )
    for policy in policies:
        check_exact(job.exact, policy)
    if job.compression is not None:
        raise InvalidSetting(
            f"exact=False and compression={job.compression!r} exclude each other: a worker keeps "
            "what each compressed gradient left out; leave one of them out"
        )


def _check_dense(job: PolicyFields, policies: list[Policy]) -> None:
    """Refuses what does not fit slices in workers, whose updates must have the bits of shards."""
    if job.dense == "shards":
        if job.slices is not None:
            raise InvalidSetting(
                f"slices is {job.slices}, but dense is 'shards'; leave slices out (`coordinator up "
                "--shards K` says how many shards there are), or say dense='allreduce'"
            )
        return
    for policy in policies:
        check_dense(job.dense, policy.mode)
    wrong = {
        "compression": job.compression,
        "local_steps": job.local_steps if job.local_steps > 1 else None,
        "devices": job.devices,
    }
    for name, value in wrong.items():
        if value is not None:
            raise InvalidSetting(
                f"dense is {job.dense!r}, which {name}={value!r} does not fit; leave {name} out, "
                "or say dense='shards'"
            )


def _refuse(job: PolicyFields, name: str, value: Any) -> None:
    """Raises the error of the first mode's policy about a setting that does not fit it."""
    setting: dict[str, Any] = {name: value}
    try:
        Policy(mode=job.mode, **setting)
    except InvalidJob as error:
        also = f"; nor is it for {job.then!r}, which follows" if job.then is not None else ""
        raise InvalidSetting(f"{error}{also}", code=error.code) from None


def _changed(job: PolicyFields, settings: Mapping[str, Any]) -> dict[str, Any]:
    defaults = _defaults(job)
    return {name: value for name, value in settings.items() if value != defaults[name]}


def _defaults(job: PolicyFields) -> dict[str, Any]:
    return {field.name: field.default for field in fields(job) if field.default is not MISSING}
