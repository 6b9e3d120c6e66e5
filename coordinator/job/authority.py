"""Issues the proofs that shards accept from workers: sessions, grants and signed decisions."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.core.run import Run
from coordinator.core.work import Report
from psrpc import SOFTWARE
from psrpc.core.commands import KEY_BYTES, Attempt, Begin, Command, Keys, WorkerClock
from psrpc.core.errors import JobMismatch
from psrpc.security.signatures import (
    DECISION,
    INITIALIZE,
    NONCE_BYTES,
    SESSION,
    SessionIdentity,
    SignedDecision,
    check_receipts,
    clock_proof,
    grant_of,
    session_body,
)


class Authority:
    """The keys of one coordinator process. A restarted coordinator has new keys; shards get them
    with its order to begin a generation, which precedes all training.

    Attributes:
        keys: the keys with which shards check the proofs of workers.
    """

    def __init__(self, random: Callable[[int], bytes] = secrets.token_bytes) -> None:
        """``random`` returns the given number of unpredictable bytes."""
        self._random = random
        self._key = Ed25519PrivateKey.from_private_bytes(random(KEY_BYTES))
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.keys = Keys(public, random(KEY_BYTES))
        self._signed: SignedDecision | None = None

    def open_session(self, worker: str, certificate: str) -> bytes:
        """Returns the token of a new session of ``worker``. ``certificate`` is the common name of
        the certificate that it calls with; empty without certificates."""
        body = session_body(SessionIdentity(worker, certificate), self._random(NONCE_BYTES))
        return self._key.sign(SESSION + body) + body

    def sign(self, decision: bytes) -> SignedDecision:
        """Signs a serialized decision, so that it can travel through workers."""
        # All workers of a round wait for the same decision, and signing takes 100 microseconds.
        if self._signed is None or self._signed.decision != decision:
            self._signed = SignedDecision(decision, self._key.sign(DECISION + decision))
        return self._signed

    def grant(self, worker: str, generation: int, attempt: Attempt) -> bytes:
        """Returns the proof that ``attempt`` was leased to ``worker`` in ``generation``."""
        return grant_of(self.keys.grant, worker, generation, attempt.batch, attempt.number)

    def proven(self, generation: int, clock: WorkerClock) -> WorkerClock:
        """Adds the proof by which shards accept a worker's ``clock`` from it (ssp)."""
        return replace(clock, proof=clock_proof(self.keys.grant, generation, clock))

    def vouched(self, worker: str, generation: int, report: Report, shards: int) -> Report:
        """Returns ``report`` of ``worker`` as the receipts of all ``shards`` prove it: skipped if a
        receipt says so.

        Raises:
            AccessDenied: the receipt of a shard is missing or wrong.
        """
        if report.too_stale:
            return report
        skipped = check_receipts(
            self.keys.grant,
            worker,
            generation,
            report.batch,
            report.attempt,
            report.receipts,
            shards,
        )
        return report if skipped == report.skipped else replace(report, skipped=skipped)

    def with_keys(self, command: Command) -> Command:
        """Adds the keys to an order to begin, by which the shard then checks workers."""
        return replace(command, keys=self.keys) if isinstance(command, Begin) else command

    def grant_initialize(self, worker: str, generation: int) -> bytes:
        """Returns the proof that ``worker`` is to initialize the shards in ``generation``."""
        return self.grant(worker, generation, Attempt(INITIALIZE, 0))


def check_software(who: str, software: str) -> None:
    """Raises JobMismatch if the peer ``who`` runs another version than this process."""
    if software != SOFTWARE:
        raise JobMismatch(
            f"{who} runs version {software or 'unknown'} of this software, the coordinator "
            f"{SOFTWARE}; install the same on both",
            code="PS131",
        )


def check_job(run: Run, who: str, job_sha256: str, settings_sha256: str) -> None:
    """Raises JobMismatch if the worker ``who`` has loaded another job file than the coordinator's,
    or other settings; an empty settings hash is not compared."""
    if job_sha256 != run.description.job_sha256:
        raise JobMismatch(
            f"the job file of {who} has SHA-256 {job_sha256}, the coordinator's {run.job_path} "
            f"has {run.description.job_sha256}; give every worker the same file, with --job "
            "where it lies elsewhere",
            code="PS132",
        )
    if settings_sha256 not in ("", run.settings_sha256):
        now = " ".join(run.overrides) or "no --set"
        raise JobMismatch(
            f"{who} has loaded the job as it was before: the run goes on with other settings or "
            f"data ({now}; mode {run.description.mode}); start the worker again",
            code="PS132",
        )
