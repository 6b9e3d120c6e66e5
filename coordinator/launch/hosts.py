"""The processes that a job needs, once its coordinator has read it: workers alone, if they host the
parameters (``dense="allreduce"``) and there are no embedding tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from coordinator.certificates.authority import RENEW_BEFORE
from coordinator.certificates.members import host_of_run
from psrpc.core.names import CERTS, JOB
from psrpc.security.certificates import CA_KEY, certificate_name, key_name
from psrpc.security.identity import Role


def needed(members: Iterable[str], run_dir: Path) -> list[str]:
    """Returns the names of the ``members`` that the job of ``run_dir`` needs. Gives a shard's
    certificates to those of its workers that have a directory of their own, or takes them away.

    Raises:
        InvalidArgument: the authority of the run is unusable.
    """
    hosted, alone = _is_hosted(run_dir)
    certs = run_dir.absolute() / CERTS
    for directory in certs.glob(f"{Role.WORKER}-*"):
        if hosted and (certs / CA_KEY).exists():
            host_of_run(certs, directory, datetime.now(UTC), RENEW_BEFORE)
        elif not hosted:
            for name in (certificate_name(Role.SHARD), key_name(Role.SHARD)):
                (directory / name).unlink(missing_ok=True)
    return [name for name in members if not (alone and name.startswith("shard-"))]


def _is_hosted(run_dir: Path) -> tuple[bool, bool]:
    """Whether workers host parameters of the job that the coordinator of ``run_dir`` serves, and
    whether they host all, since there are no tables whose rows are on shards."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        description = json.loads((run_dir / JOB).read_bytes())["description"]
        hosted = description["dense"] == "allreduce"
        return hosted, hosted and not description.get("tables")
    return False, False
