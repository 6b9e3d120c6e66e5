"""Reads the ``key=value`` settings with which a user changes the policy of a running job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.core.description import DENSE, JobDescription
from coordinator.core.run import Run
from coordinator.core.wording import in_words
from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.core.policy import SETTINGS, Policy, check_dense, check_exact, check_prefetch, fitting
from psrpc.core.text import counted
from psrpc.options.config_keys import did_you_mean

OF_THE_JOB = ("epochs", "scale_lr", "warmup_epochs", "then", "then_after", "exact")
"""Settings of a job that look like those of its policy. They cannot change while it runs."""

OF_THE_RUN = ("batch_size", "local_steps", "seed")
"""Settings that can never change: they identify the batches of a run."""


OF_THE_CLUSTER = ("dense", "slices")
"""Settings of a job that say which processes it has. A change starts the cluster again."""

OF_THE_COMMAND = ("shards", "workers")
"""Options that look like settings."""


def cluster_settings(settings: Iterable[str]) -> dict[str, str]:
    """Returns the settings by name, as text, if they say which processes the job has; empty if none
    of them does.

    Raises:
        InvalidSetting: only some of them do, there is an option of the command among them, or a
            value is none of the setting's.
    """
    pairs = [setting.partition("=") for setting in settings]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    ours = {key: value for key, value in found.items() if key in OF_THE_CLUSTER and value}
    for key, value in ours.items():
        _check_of_cluster(key, value)
    if ours and ours != found:
        for key, value in found.items():
            _check_option(key, value)
        others = ", ".join(key for key in found if key not in ours)
        raise InvalidSetting(
            f"{in_words(ours)} starts the cluster again, and {others} cannot be set by the same "
            "command; set one after the other"
        )
    return ours


def _check_of_cluster(key: str, value: str) -> None:
    """Refuses a value before the job is described with it, which takes as long as a start."""
    if key == "dense" and value not in DENSE:
        known = did_you_mean(value, DENSE) or f"; expected {' or '.join(DENSE)}"
        raise InvalidSetting(f"dense={value}: there is no such way{known}")
    if key == "slices" and value.lower() != "none" and not (value.isdecimal() and int(value)):
        raise InvalidSetting(f"slices={value}: expected a whole number of at least 1, or none")


def _check_option(key: str, value: str) -> None:
    if key in OF_THE_COMMAND:
        several = key == "shards" and value.strip("0").isdecimal()
        slices = f"; or, if workers host the parameters, set slices={value}" if several else ""
        raise InvalidSetting(
            f"{key}={value}: {key} is an option of the start and cannot be changed while the job "
            f"runs; stop it and go on with --resume --{key} {value}{slices}"
        )


def with_cluster(changed: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings ``changed`` so far with those ``asked`` for: a job without slices says
    no number of them."""
    both = {**changed, **asked}
    return {**both, "slices": "none"} if asked == {"dense": "shards"} else both


def check_restart(run: Run, described: JobDescription) -> None:
    """Checks that the job of ``run``, ``described`` anew with other processes, is the same job but
    for these, and can have them. Raises InvalidSetting or InvalidJob."""
    before, after = run.description.document, described.document
    keys = {**before, **after}.keys() - OF_THE_CLUSTER
    others = sorted(key for key in keys if before.get(key) != after.get(key))
    if others:
        raise InvalidJob(
            f"the job is another one than this run was started with ({', '.join(others)}): its "
            "file or its data have changed; stop it, and go on with --resume"
        )
    check_dense(described.dense, run.settings.mode)


def refused_while_running(setting: str, key: str) -> InvalidSetting:
    """Returns the error for a setting of the job that takes a start of the run."""
    return InvalidSetting(
        f"{setting}: {key} belongs to the job and cannot be changed while it runs; stop it "
        f"and go on with --resume --set {setting}"
    )


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Returns the values by name. The last value of a key counts; None selects the default.

    Raises:
        InvalidJob: a setting has no ``=``, or an unknown key; the message names the nearest known
            key.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not key or not text:
            raise InvalidSetting(
                f"{setting!r}: expected key=value, for example staleness=4", code="PS104"
            )
        if key in (*OF_THE_JOB, *OF_THE_CLUSTER) or key.startswith("optimizer."):
            raise refused_while_running(setting, key)
        _check_option(key, text)
        if key in OF_THE_RUN:
            raise InvalidSetting(
                f"{setting}: {key} says what the batches of this run are and cannot be changed; "
                f"start a new run with --set {setting}"
            )
        if key not in SETTINGS:
            hint = did_you_mean(key, SETTINGS) or f"; known: {', '.join(SETTINGS)}"
            raise InvalidSetting(f"{setting}: a policy has no {key}{hint}", code="PS104")
        values[key] = _value(text)
    if not values:
        raise InvalidSetting(
            "no settings; expected key=value, for example mode=ssp staleness=4", code="PS104"
        )
    return values


def changed_policy(stands: Policy, values: Mapping[str, Any], job: JobDescription) -> Policy:
    """Returns the present policy ``stands`` with ``values`` changed; its other settings stay if
    they fit the mode.

    Raises:
        InvalidJob: settings that do not fit the mode, each other or the job; gives the reason.
    """
    mode = values.get("mode", stands.mode)
    kept = fitting(mode, stands.changed())
    document = {"mode": mode, **kept, **values}
    policy = Policy.from_json({k: v for k, v in document.items() if v is not None})
    check_for_job(policy, job)
    return policy


def check_for_job(policy: Policy, job: JobDescription) -> None:
    """Raises InvalidJob if the job cannot be trained with ``policy``."""
    needed = job.unit * policy.open
    if policy.open > 1 and needed > job.train_records:
        raise InvalidSetting(
            f"a round of {policy.open} micro-batches (replicas) has {counted(needed, 'record')}, "
            f"and train holds {job.train_records}; use fewer replicas"
        )
    for name in ("balance", "delay_compensation"):
        if job.local_steps > 1 and getattr(policy, name):
            raise InvalidSetting(
                f"{name} and local_steps exclude each other, and the job has local_steps "
                f"{job.local_steps}"
            )
    if job.tables and policy.delay_compensation is not None:
        raise InvalidSetting(
            f"delay_compensation is {policy.delay_compensation!r}, but the model has embedding "
            "tables: shards keep no earlier rows to correct a gradient by; leave it out"
        )
    if job.prefetch_rows:
        check_prefetch(policy)
    check_dense(job.dense, policy.mode)
    check_exact(job.exact, policy)


def _value(text: str) -> Any:
    word = text.lower()
    if word in ("true", "false", "none"):
        return {"true": True, "false": False}.get(word)
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text
