"""Settles which run to serve, before any shard or worker is admitted: a new or an earlier one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from coordinator.checkpoints.checkpoints import remove_unfinished
from coordinator.core.description import JobDescription
from coordinator.core.run import Followed, Run
from coordinator.core.wording import in_words
from coordinator.job.job_run import JobRun
from coordinator.process.changed_settings import ChangedSettings
from coordinator.process.resume_checks import (
    check_checkpoint,
    check_goes_on,
    check_same_name,
    difference,
    ended_unsaved,
    left_out,
    nothing_to_resume,
    saved,
)
from coordinator.records.run_directory import RunDirectory, started_with
from coordinator.records.store import Store
from coordinator.records.stored_values import (
    CHANGED,
    ENDED,
    FIRST,
    GENERATION,
    IDENTITY,
    POLICIES,
    SAID,
    SINCE,
    TWICE,
)
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.core.errors import CheckpointError, JobDone
from psrpc.core.names import CERTS, CHECKPOINTS
from psrpc.core.plan import Plan
from psrpc.core.policy import SETTINGS, Policy, check_dense
from psrpc.files.storage import DISK, Storage
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import CA_KEY
from psrpc.security.credentials import Security

log = get_logger()

FREE_TO_CHANGE = (
    "checkpoint_every",
    "evaluate_every_epoch",
    "full_checkpoint_every",
    "keep_best",
    "keep_checkpoints",
    "reduce_lr",
    "stop_early",
    "unsummed_metrics",
)
"""Settings of a job that may change when a run that has not ended continues without --resume. Any
other setting belongs to the job's identity; a change of it requires --resume."""


class Options(Protocol):
    """The options by which :func:`settle` chooses the run; see ServeOptions."""

    @property
    def job(self) -> Path: ...
    @property
    def shards(self) -> int: ...
    @property
    def mode(self) -> str | None: ...
    @property
    def replicas(self) -> int | None: ...
    @property
    def overrides(self) -> tuple[str, ...]: ...
    @property
    def resume(self) -> bool: ...
    @property
    def auto_resume(self) -> bool: ...


def settle(
    options: Options,
    description: JobDescription,
    plan: Plan,
    directory: RunDirectory,
    store: Store,
    storage: Storage = DISK,
    kept: ChangedSettings | None = None,
) -> Run:
    """Returns the run to serve, and stores it.

    A directory without a run gets one. A run that has not ended continues with the same job; its
    shards may still be alive. A run that ended before its first checkpoint begins anew, since
    nothing is trained before that. A run that has ended, or continues as another job, is resumed.
    Its last policy stays, unless it is resumed with another one than it was started with. With
    ``auto_resume`` the state of the run selects among these. ``kept`` settings are among
    ``options`` though the user did not say them; a run that was saved for a start with them is
    resumed.

    Raises:
        JobDone: the run is done; only with ``auto_resume``.
        AlreadyExists: the run has ended, and --resume is not set.
        InvalidJob: the run is of another job, or the job does not fit the checkpoint to resume.
        CheckpointError: there is no good checkpoint to resume.
        OSError: the operating system refused.
    """
    identity = _identity(options, description, plan)
    known = store.get(IDENTITY)
    ended = store.get(ENDED)
    run_id, token, resume = secrets.token_hex(8), "", options.resume
    kept = kept or ChangedSettings(said=settings_said(options))
    if known is not None:
        run_id = known["run_id"]
        resume = resume or kept.pending
        if options.auto_resume:
            resume = _resumes(directory.path, store, known, identity) or resume
        elif not resume and ended_unsaved(directory.path, store, storage):
            check_same_name(directory.path, known, identity)
        elif not resume:
            check_goes_on(directory.path, known, identity, ended)
        if ended is None and not difference(known, identity):
            # Its shards may still be alive, and present the token that they know.
            token = directory.token()
    policies = tuple(Followed.from_json(document) for document in store.get(POLICIES) or ())
    generation, since = store.get(GENERATION) or 0, store.get(SINCE) or 0
    first = (known or {}).get(FIRST) or identity["policy"]
    if known is not None and not resume and difference(known, identity):
        # Nothing was trained with the earlier policy.
        first = identity["policy"]
    remarks: list[str] = []
    twice = store.get(TWICE) or 0
    if resume:
        try:
            chosen = check_checkpoint(
                directory.path, description, plan, run_id if known else None, storage
            )
        except CheckpointError as error:
            if known is None or saved(directory.path, store, storage):
                raise
            raise nothing_to_resume(directory.path, error) from None
        run_id = chosen.run_id
        # A new ledger, in place of a damaged one, knows no generation.
        generation = max(generation, _highest_generation(directory.path, storage))
        twice += chosen.apart
        stands = policies[-1] if policies else Followed(1, Policy.from_json(first))
        asked = description.policy
        if (
            known
            and known.get("policy") not in (None, identity["policy"])
            and (asked != stands.settings)
        ):
            followed = Followed(
                stands.number + 1,
                asked,
                chosen.restored.global_step,
                chosen.batches,
                stands.rate,
            )
            log.info("the policy has changed", to=str(followed), step=followed.step)
            policies, since = (*policies, followed), generation + 1
        remarks = left_out(known or {}, settings_said(options))
        now = policies[-1].settings if policies else stands.settings
        check_dense(description.dense, now.mode)
        if now != stands.settings:
            remarks.append(f"the run goes on as {now}; it was {stands.settings}")
        elif now != asked:
            remarks.append(
                f"the run goes on as {now}, which it was changed to while it ran, and not as "
                f"{asked}; `coordinator set` changes it back"
            )
        if kept.settings and not kept.pending:
            remarks.append(
                f"the run goes on with {in_words(kept.settings)}, which it was changed to while it "
                "ran; `coordinator set` changes it back"
            )
    if known is not None or resume:
        remove_unfinished(directory.path, storage)
        log.info("the run goes on", run_dir=str(directory.path), run_id=run_id)
    _store(
        store,
        {
            GENERATION: generation,
            SINCE: since,
            POLICIES: [one.to_json() for one in policies] or None,
            IDENTITY: {"run_id": run_id, FIRST: first, SAID: kept.said, **identity},
            ENDED: None,
            CHANGED: {"settings": dict(kept.settings), "pending": False} if kept.settings else None,
            TWICE: twice or None,
        },
    )
    directory.write_job(
        started_with(options.job, options.overrides, options.mode, options.replicas, description)
    )
    return Run(
        run_id=run_id,
        run_dir=directory.path,
        job_path=str(options.job),
        overrides=overrides_for_workers(options),
        token=token or directory.new_token(),
        description=description,
        plan=plan,
        generation=generation,
        since=since,
        policies=policies,
        first=Policy.from_json(first),
        remarks=(*remarks, *_of_empty_shards(plan)),
        counted_twice=twice,
        changed=kept.settings,
    )


def _of_empty_shards(plan: Plan) -> list[str]:
    """Returns a remark on shards without parameters; where there are tables, a shard may have rows,
    but a slice has none."""
    count = plan.dense_shards
    empty = sum(not plan.shard_nbytes(plan.shards - 1 - index) for index in range(count))
    if not empty or (plan.tables and not plan.slices):
        return []
    what, fewer = ("slices", "slices=") if plan.slices else ("shards", "--shards ")
    return [
        f"{empty} of {count} {what} {'holds' if empty == 1 else 'hold'} no parameters: the "
        f"model is too small for so many; say fewer, such as {fewer}{count - empty}"
    ]


def overrides_for_workers(options: Options) -> tuple[str, ...]:
    """Returns the overrides as a worker must apply them, including --replicas."""
    if options.replicas is None:
        return options.overrides
    return (*options.overrides, f"replicas={options.replicas}")


def settings_said(options: Options) -> dict[str, str]:
    """Returns the overrides by key, without those of the policy, which are compared as a whole."""
    split = (override.partition("=") for override in overrides_for_workers(options))
    return {key.strip(): value for key, _, value in split if key.strip() not in SETTINGS}


def _identity(options: Options, description: JobDescription, plan: Plan) -> dict[str, Any]:
    """Returns the properties that identify a run's job, as JSON types."""
    return {
        "job": description.name,
        "job_sha256": description.job_sha256,
        "policy": description.policy.to_json(),
        "overrides": {k: v for k, v in settings_said(options).items() if k not in FREE_TO_CHANGE},
        "data": description.data_fingerprint,
        "shards": plan.shards,
        "plan": plan.hash.hex(),
    }


def _resumes(
    path: Path, store: Store, known: Mapping[str, Any], identity: Mapping[str, Any]
) -> bool:
    """Whether a run continues from its newest checkpoint, as with --resume. Otherwise it continues
    from its shards' state or, without a checkpoint, from the beginning.

    Raises:
        JobDone: the run is done.
        InvalidJob: the run is of a job file of another name.
    """
    ended, key = store.get(ENDED), difference(known, identity)
    check_same_name(path, known, identity)
    if not key and (ended or {}).get("phase") == "done":
        raise JobDone(
            f"the job of run directory {path} is done; --set epochs=N, of all epochs, goes on"
        )
    return bool(ended is not None or key) and store.newest_checkpoint() is not None


def _highest_generation(run_dir: Path, storage: Storage) -> int:
    """Returns the highest generation of all checkpoints. Later checkpoints need a higher one to
    count as newer."""
    found = find_checkpoints(run_dir / CHECKPOINTS, storage)
    return max((manifest.generation for _, manifest in found.manifests), default=0)


def _store(store: Store, values: Mapping[str, Any]) -> None:
    """Writes only changed values: the disk may be full."""
    changed = {key: value for key, value in values.items() if store.get(key) != value}
    if changed:
        store.put_all(changed)


def warn_of_key(job_run: JobRun, security: Security) -> None:
    """Warns once if the certificate authority's key lies where no process needs it. Certificates
    that the run made for itself serve this machine alone and are exempt."""
    directory = security.directory
    if directory is None or directory.absolute() == job_run.run.run_dir / CERTS:
        return
    if (directory / CA_KEY).exists():
        warning = (
            f"--certs {directory} holds {CA_KEY}, with which a thief makes certificates of any "
            "role; keep it elsewhere, and give each process the files of its role alone"
        )
        job_run.warnings.add(warning)
