"""The values of a run's ledger: their keys, and the checks that they pass when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, SnapshotOrder
from psrpc.core.document import (
    Check,
    anything,
    flag,
    listed,
    mapped,
    maybe,
    real,
    real_or_nan,
    record,
    text,
    whole,
    wrong,
)
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.names import check_file_name
from psrpc.core.policy import Policy

GENERATION = "generation"
SINCE = "since"
"""The generation since which all shards have kept their parameters."""

RESTORED = "restored"
"""For each generation that restored a checkpoint: its number, the generation and global step of
that checkpoint, and the shards that kept their parameters. Only for jobs with tables."""

POLICIES = "policies"
"""The policies of the run: number, settings, global step and batches done when each began; null
while the first one is in force."""

TWICE = "counted_twice"
"""Number of batches that may have counted twice on some of the parameters; null for none."""

ENDED = "ended"
"""The end of the run: phase and reason; null while it runs."""

CHANGED = "changed"
"""Settings of the job that were changed while it ran, and whether a coordinator that takes them up
is still to come (``pending``); null for none."""

BARRED = "barred"
"""Processes that may not register: ``coordinator.membership.membership.Membership.barred``."""

IDENTITY = "identity"
"""The identity of the run, see :mod:`coordinator.process.settling`."""

FIRST = "first"
"""Key of the identity: the policy that the run began with."""

SAID = "said"
"""Key of the identity: the settings that the run was started with last, no part of its identity."""

FIRST_LOSS = "first_loss"
"""The guard's reference loss, which a resumed job keeps; null until it is known."""


class RestoredGeneration(NamedTuple):
    """The generation ``formed`` from a checkpoint, the generation and global step of that
    checkpoint, and the shards that ``kept`` their parameters instead."""

    formed: int
    generation: int
    global_step: int
    kept: Sequence[int] = ()


def _policy(value: Any, where: str) -> Any:
    """Accepts the settings of a policy."""
    try:
        Policy.from_json(mapped(anything)(value, where))
    except InvalidJob as error:
        raise ValueError(f"{where}: {error}") from None
    return value


def _restored(value: Any, where: str) -> Any:
    """Accepts the fields of a :class:`RestoredGeneration`."""
    numbers = listed(whole(), most=3, least=3)
    if type(value) is not list or not 3 <= len(value) <= 4:
        raise wrong(value, where, "a generation, a checkpoint's and its step, and shards")
    numbers(value[:3], where)
    for kept in value[3:]:
        listed(whole())(kept, where)
    return value


VALUES: Mapping[str, Check] = {
    GENERATION: maybe(whole()),
    SINCE: maybe(whole()),
    RESTORED: maybe(listed(_restored)),
    POLICIES: maybe(
        listed(
            record(
                {"number": whole(), "settings": _policy, "step": whole(), "batches": whole()},
                {"rate": real},
            )
        )
    ),
    TWICE: maybe(whole()),
    ENDED: maybe(record({"phase": text, "reason": text}, more=True)),
    IDENTITY: maybe(
        record(
            {"run_id": text},
            {
                FIRST: _policy,
                "policy": maybe(_policy),
                "overrides": mapped(text),
                SAID: mapped(text),
            },
            more=True,
        )
    ),
    CHANGED: maybe(record({"settings": mapped(text), "pending": flag})),
    FIRST_LOSS: maybe(real),
    BARRED: maybe(mapped(text)),
}
"""The values of the ledger by key."""


def stored_name(value: Any, where: str) -> Any:
    """Accepts the name of a checkpoint."""
    try:
        return check_file_name(text(value, where), where)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


EPOCH = record(
    {
        "epoch": whole(),
        "step": whole(),
        "training": mapped(real_or_nan),
        "evaluation": mapped(real_or_nan),
        "learning_rate": maybe(real),
    },
    {"checkpoint": text, "eval_step": maybe(whole())},
)
"""A row of the history, see :class:`coordinator.records.epochs.EpochRow`."""

ID = whole(0, (1 << 63) - 1)
"""Incarnations and attempts, which use all bits of SQLite's signed integer."""

_DECISION = record(
    {
        "generation": whole(),
        "round": whole(),
        "attempts": listed(
            record(
                {
                    "batch": record(dict.fromkeys(("epoch", "first", "count"), whole())),
                    "number": ID,
                }
            )
        ),
        "snapshots": listed(
            record(
                {"name": text, "global_step": whole()},
                {"keep": flag, "write": flag, "directory": text, "base": text, "parts": whole()},
            )
        ),
    }
)


def stored_decision(value: Any, where: str) -> Decision:
    """Checks and makes a decision of JSON. Raises ValueError."""
    document = _DECISION(value, where)
    return Decision(
        generation=document["generation"],
        round=document["round"],
        attempts=tuple(Attempt(BatchId(**a["batch"]), a["number"]) for a in document["attempts"]),
        snapshots=tuple(SnapshotOrder(**s) for s in document["snapshots"]),
    )
