"""Reads the ``key=value`` settings with which a user changes the policy of a running job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.core.description import JobDescription
from psrpc.core.errors import InvalidSetting
from psrpc.core.policy import SETTINGS, Policy, check_dense, check_exact, check_prefetch, fitting
from psrpc.core.text import counted
from psrpc.options.config_keys import did_you_mean

OF_THE_JOB = (
    *("epochs", "scale_lr", "warmup_epochs", "then", "then_after", "exact", "dense", "slices"),
)
"""Settings of a job that look like those of its policy. They cannot change while it runs."""

OF_THE_RUN = ("batch_size", "local_steps", "seed")
"""Settings that can never change: they identify the batches of a run."""


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
        if key in OF_THE_JOB or key.startswith("optimizer."):
            raise InvalidSetting(
                f"{setting}: {key} belongs to the job and cannot be changed while it runs; stop it "
                f"and go on with --resume --set {setting}"
            )
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
    check_dense(job.dense, policy)
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
