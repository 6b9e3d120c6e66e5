"""Identities in certificates (a role in a job), and the RPCs that each role may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Self

from psrpc.core.errors import InvalidArgument

SCHEME = "pserver://"
DOMAIN = "pserver"
CA = "ca"
"""Stands in place of a role in the name of a job's certificate authority."""

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LONGEST = 63


class Role(StrEnum):
    """The role of a process. Certificates contain the values: load-bearing."""

    COORDINATOR = "coordinator"
    SHARD = "shard"
    WORKER = "worker"
    OPERATOR = "operator"
    READER = "reader"

    @property
    def one(self) -> str:
        """The role with its article: ``a worker``, ``an operator``."""
        return f"{'an' if self is Role.OPERATOR else 'a'} {self}"

    @property
    def serves(self) -> bool:
        """Whether others connect to this role, so that its certificate has a DNS name."""
        return self in (Role.COORDINATOR, Role.SHARD)

    @property
    def shows_metrics(self) -> bool:
        """Whether this role serves metrics, so that its certificate is valid for servers, too."""
        return self.serves or self is Role.WORKER


@dataclass(frozen=True, slots=True)
class Identity:
    """A role in a job. The constructor checks that ``job`` is a DNS label.

    Raises:
        InvalidArgument: it is not.
    """

    job: str
    role: Role

    def __post_init__(self) -> None:
        check_job_name(self.job)

    def __str__(self) -> str:
        return f"{self.role.one} of job {self.job}"

    @property
    def uri(self) -> str:
        """``pserver://JOB/ROLE``, the URI SAN in the certificate of this identity."""
        return f"{SCHEME}{self.job}/{self.role}"

    @property
    def server_name(self) -> str:
        """``ROLE.JOB.pserver``, the DNS SAN that clients expect in its certificate."""
        return server_name(self.job, self.role)

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Reads ``pserver://JOB/ROLE``.

        Raises:
            InvalidArgument: ``uri`` does not have this form.
        """
        job, slash, role = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or not slash or role not in set(Role):
            roles = ", ".join(Role)
            raise InvalidArgument(
                f"the certificate names {uri!r}; expected {SCHEME}JOB/ROLE with one of {roles}"
            )
        return cls(job, Role(role))


@lru_cache(maxsize=256)
def identity_of(uri: bytes) -> Identity | None:
    """Parses the URI in a peer's certificate; None for a URI of another kind."""
    try:
        return Identity.from_uri(uri.decode())
    except (InvalidArgument, UnicodeDecodeError):
        return None


def server_name(job: str, role: Role) -> str:
    """Returns the DNS name in the certificate of ``role``, to which others connect."""
    return f"{role}.{job}.{DOMAIN}"


def ca_uri(job: str) -> str:
    """Returns the URI SAN of the certificate authority of a job."""
    return f"{SCHEME}{job}/{CA}"


def job_of_ca(uri: str) -> str:
    """Returns the job whose certificate authority has the name ``uri``; empty for other names."""
    job, slash, who = uri.removeprefix(SCHEME).partition("/")
    named = uri.startswith(SCHEME) and slash and who == CA and _LABEL.fullmatch(job)
    return job if named else ""


def check_job_name(job: str) -> None:
    """Raises InvalidArgument for a job name that a certificate cannot contain."""
    if not _LABEL.fullmatch(job):
        raise InvalidArgument(
            f"job name {job!r} cannot stand in a certificate; expected 1 to {_LONGEST} lower-case "
            "letters, digits and hyphens, no hyphen first or last"
        )


def job_name(text: str) -> str:
    """Returns a valid job name similar to ``text``, for example to the name of a file."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST].strip("-")
    return label or "job"


_COORDINATOR = "/psrpc.v1.Coordinator/"
_SHARD = "/psrpc.v1.ParameterServer/"
_HEALTH = "/grpc.health.v1.Health/"
_EVERYBODY = frozenset(Role)
_SHARDS = frozenset({Role.SHARD})
_WORKERS = frozenset({Role.WORKER})
_OPERATORS = frozenset({Role.OPERATOR})

PERMISSIONS: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        _COORDINATOR + "GetJob": frozenset({Role.WORKER, Role.OPERATOR}),
        _COORDINATOR + "RegisterShard": _SHARDS,
        _COORDINATOR + "ReportShardReady": _SHARDS,
        _COORDINATOR + "HeartbeatShard": _SHARDS,
        _COORDINATOR + "Watch": _SHARDS,
        _COORDINATOR + "ReportSnapshot": _SHARDS,
        _COORDINATOR + "RegisterWorker": _WORKERS,
        _COORDINATOR + "HeartbeatWorker": _WORKERS,
        # Readers look up rows, so they need the addresses of the shards.
        _COORDINATOR + "GetCluster": frozenset({Role.WORKER, Role.OPERATOR, Role.READER}),
        _COORDINATOR + "LeaseWork": _WORKERS,
        _COORDINATOR + "CommitBatch": _WORKERS,
        _COORDINATOR + "ReportWork": _WORKERS,
        _COORDINATOR + "LeaveWorker": _WORKERS,
        _COORDINATOR + "SetPolicy": _OPERATORS,
        _COORDINATOR + "AwaitHold": _OPERATORS,
        _COORDINATOR + "EndHold": _OPERATORS,
        _COORDINATOR + "RevokeWorker": _OPERATORS,
        _COORDINATOR + "GetJobStatus": frozenset({Role.OPERATOR, Role.READER}),
        _COORDINATOR + "GetDashboard": _OPERATORS,
        _SHARD + "Initialize": _WORKERS,
        _SHARD + "Pull": _WORKERS,
        _SHARD + "PushGradients": _WORKERS,
        _SHARD + "Exchange": _WORKERS,
        _SHARD + "LookUp": frozenset({Role.OPERATOR, Role.READER}),
        _SHARD + "GetStatus": frozenset({Role.WORKER, Role.OPERATOR}),
        _HEALTH + "Check": _EVERYBODY,
        _HEALTH + "List": _EVERYBODY,
        # Answered with UNIMPLEMENTED: see psrpc.net.health.
        _HEALTH + "Watch": _EVERYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
    }
)
"""Full name of each RPC, as on the wire -> the roles that may call it."""


def roles_of(method: str) -> frozenset[Role]:
    """Returns the roles that may call the RPC with the full name ``method``, for example
    ``/psrpc.v1.Coordinator/GetJob``."""
    return PERMISSIONS.get(method, frozenset())


def may_read_metrics(peer: Identity | None, server: Identity) -> bool:
    """Returns whether ``peer`` (None if unknown) may read the metrics of ``server``. Operators and
    readers (metrics collectors) may, and processes of the same role, because a process checks its
    own health."""
    allowed = (Role.OPERATOR, Role.READER, server.role)
    return peer is not None and peer.job == server.job and peer.role in allowed
