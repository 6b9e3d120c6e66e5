"""Refuses to continue a run that does not fit the job."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.checkpoints.choice import Chosen, choose_checkpoint
from coordinator.core.description import JobDescription
from coordinator.records.ledger_file import DamagedLedger, damaged_ledger
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED, SAID
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.core.errors import AlreadyExists, CheckpointError, InvalidJob
from psrpc.core.names import CHECKPOINTS
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.files.storage import DISK, Storage
from psrpc.ops.logs import get_logger

log = get_logger()


def check_ledger(path: Path, *, resume: bool) -> None:
    """Refuses a run directory whose ledger is damaged or whose run has ended, before it is changed
    and before seconds go into describing the job. Leaves other read errors to :func:`settle`.

    Args:
        resume: a run that has ended may continue.

    Raises:
        CheckpointError: the ledger is damaged.
        AlreadyExists: the run has ended, and --resume is not set.
    """
    if not (path / LEDGER).exists():
        return
    store, ended, begins_anew = Store(path / LEDGER), None, False
    try:
        store.open_to_read()
        ended = store.get(ENDED)
        begins_anew = ended_unsaved(path, store)
        store.check()
    except DamagedLedger as error:
        raise damaged_ledger(error) from None
    except sqlite3.Error:
        pass
    finally:
        store.close()
    if not resume and not begins_anew:
        _check_not_ended(path, ended)


def _check_not_ended(path: Path, ended: Any) -> None:
    if ended is not None:
        raise AlreadyExists(
            f"run directory {path} holds a run that has ended ({ended['phase']}); say --resume to "
            "go on with it, or choose another --run-dir",
            code="PS123",
        )


def ended_unsaved(path: Path, store: Store, storage: Storage = DISK) -> bool:
    """Whether a run has failed or was stopped without a checkpoint that a new start could lose."""
    phase = (store.get(ENDED) or {}).get("phase")
    return phase not in (None, "done") and not saved(path, store, storage)


def saved(path: Path, store: Store, storage: Storage) -> bool:
    """Whether the run has or had a checkpoint, good or not."""
    found = find_checkpoints(path / CHECKPOINTS, storage)
    return bool(store.newest_checkpoint() or found.manifests or found.refused)


def nothing_to_resume(path: Path, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"cannot resume: the run of {path} has saved nothing, and nothing of it was trained; "
        f"--run-dir {shlex.quote(str(path))} without --resume begins it anew",
        code=error.code,
    )


def check_goes_on(
    path: Path, known: Mapping[str, Any], identity: Mapping[str, Any], ended: Any
) -> None:
    _check_not_ended(path, ended)
    key = difference(known, identity)
    if key:
        theirs, ours = (_shown(key, each.get(key)) for each in (known, identity))
        raise InvalidJob(
            f"run directory {path} holds a run that has not ended, of another job: its {key} is "
            f"{theirs}, this one's {ours}. Start it as it was, say --resume "
            "to go on with the change, or choose another --run-dir",
            code="PS124",
        )


def check_same_name(path: Path, known: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    if known["job"] != identity["job"]:
        raise InvalidJob(
            f"run directory {path} holds a run of job {known['job']!r}, and this is job "
            f"{identity['job']!r}; choose another --run-dir, or say --resume to go on from what "
            "the other has trained",
            code="PS124",
        )


def left_out(known: Mapping[str, Any], said: Mapping[str, str]) -> list[str]:
    """Returns a remark on each setting that a resumed run was started with and that is missing from
    ``said``, the settings of this start."""
    # A ledger of an earlier version has only the settings of the identity.
    before = known.get(SAID, known.get("overrides", {}))
    return [
        f"the run was started with --set {key}={value}, which is not said now: what the job file "
        "says holds"
        for key, value in before.items()
        if key not in said
    ]


def _shown(key: str, value: Any) -> str:
    return str(Policy.from_json(value)) if key == "policy" and value else repr(value)


def difference(known: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Returns the first key in which two jobs differ; empty if they are the same."""
    return next((key for key, value in identity.items() if known.get(key) != value), "")


def check_checkpoint(
    path: Path, description: JobDescription, plan: Plan, run_id: str | None, storage: Storage
) -> Chosen:
    chosen = choose_checkpoint(path, description, run_id, storage=storage, plan=plan)
    for remark in chosen.remarks:
        log.warning("resuming", remark=remark)
    log.info("resuming", checkpoint=str(path / chosen.restored.directory))
    return chosen
