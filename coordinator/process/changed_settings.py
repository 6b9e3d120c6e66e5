"""Settings of a job that ``coordinator set`` has changed while it ran: kept in the ledger, and put
behind those of the command line at each start."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.core.description import JobDescription, check_for_shards
from coordinator.core.wording import in_words
from coordinator.process.describing import DescribeFailed, describe_patiently
from coordinator.process.options import ServeOptions
from coordinator.records.ledger_file import DamagedLedger
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from coordinator.records.stored_values import CHANGED, IDENTITY, SAID
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan
from psrpc.files.run_paths import newest_run

_REFUSAL = re.compile(r"error(?: (PS\d{3}))?: (.*)")
"""The last line of a description that failed."""


@dataclass(frozen=True)
class ChangedSettings:
    """The changed ``settings`` that hold at a start, and those that the user has ``said`` for it.
    ``pending``: the run was saved for a start with the changed ones, and none has come since."""

    settings: Mapping[str, str] = field(default_factory=dict)
    pending: bool = False
    said: Mapping[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as ``key=value``."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())

    def plan(self, options: ServeOptions, description: JobDescription) -> Plan:
        """Returns the plan of the job that these settings are part of. Raises InvalidJob, which
        says where they come from, if it does not fit the shards and workers of ``options``."""
        try:
            check_for_shards(description, options.shards, options.workers)
            return description.plan(options.shards)
        except InvalidJob as error:
            if not self.settings:
                raise
            raise InvalidJob(
                f"{error}. {in_words(self.settings)} was set while the job ran (`coordinator set`) "
                "and holds until a start says otherwise: "
                f"{' '.join(f'--set {key}=...' for key in self.settings)}",
                code=error.code,
            ) from None


def kept_settings(run_dir: Path | None, said: Mapping[str, str]) -> ChangedSettings:
    """Returns the changed settings of the run in ``run_dir``. They hold until a start says one of
    them, by ``said``, and otherwise than the start before."""
    none = ChangedSettings(said=said)
    if run_dir is None or not (run_dir / LEDGER).exists():
        return none
    store = Store(run_dir / LEDGER)
    try:
        store.open_to_read()
        kept, before = store.get(CHANGED), (store.get(IDENTITY) or {}).get(SAID, {})
    except DamagedLedger:
        raise
    except sqlite3.Error:
        # `settle` reads the ledger again, and says why that fails.
        return none
    finally:
        store.close()
    if kept is None or any(said.get(k, before.get(k)) != before.get(k) for k in kept["settings"]):
        return none
    return ChangedSettings(kept["settings"], kept["pending"], said)


def with_kept(
    options: ServeOptions, said: Mapping[str, str]
) -> tuple[ServeOptions, ChangedSettings]:
    """Returns the options with the changed settings of the run that they go on with, and these."""
    run_dir = options.run_dir
    if run_dir is None and (options.resume or options.auto_resume):
        run_dir = newest_run(options.job.stem)
    kept = kept_settings(run_dir, said)
    return replace(options, overrides=(*options.overrides, *kept.overrides)), kept


async def describe_changed(options: ServeOptions, changed: Mapping[str, str]) -> JobDescription:
    """Describes the job with the settings ``changed``, too, while it runs.

    Raises:
        InvalidJob: it cannot be trained with them, by these shards and workers; in one line.
    """
    more = ChangedSettings(changed).overrides
    try:
        found = await describe_patiently(replace(options, overrides=(*options.overrides, *more)))
    except DescribeFailed as error:
        last = str(error).strip().rpartition("\n")[2]
        refusal = _REFUSAL.fullmatch(last)
        code, why = (refusal[1] or "", refusal[2]) if refusal else ("", last)
        raise InvalidJob(why, code=code) from None
    ChangedSettings().plan(options, found)
    return found
