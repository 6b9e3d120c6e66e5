"""Answers of a coordinator that has no run to serve: the job is done, or cannot be begun.

Shards and workers that a supervisor starts beside such a coordinator would wait for it until their
--connect-timeout, and again at each restart.
"""

from __future__ import annotations

from psrpc.core.errors import CoordinatorRefuses, InvalidJob, JobDone, PsError

FIRST_WORDS = {"GetJob", "RegisterShard"}
"""What a process asks first, before it holds anything."""


def refusal(why: PsError, method: str) -> PsError:
    """What a call of ``method`` hears. A process that holds part of the run waits for a coordinator
    that serves it: a corrected command finds its state."""
    if isinstance(why, JobDone):
        return why
    if method in FIRST_WORDS:
        return InvalidJob(f"the coordinator refuses to start: {why}", code=why.code)
    return CoordinatorRefuses(f"the coordinator refuses to start: {why.coded}")
