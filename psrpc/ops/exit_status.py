"""The exit statuses of ``coordinator``, ``pserver serve`` and ``worker run``. Pure.

Supervisors (systemd, Kubernetes, compose) act on them, see docs/supervisors.md: only :data:`DONE`
is success; after any other status the process may have work left.
"""

from __future__ import annotations

import signal

DONE = 0
"""The job is done."""

FAILED = 1
"""The job failed, or a peer stayed away for too long."""

BAD_INPUT = 2
"""The same command would fail again."""

DRAINED = 75
"""The process got SIGTERM before the job was done; the same command resumes it. EX_TEMPFAIL of
sysexits.h."""

RESTARTS = 76
"""The coordinator has ended the processes of a job whose settings were changed. Its supervisor,
``coordinator up``, starts the whole cluster again, with the same commands."""

INTERRUPTED = 130
"""A person stopped the process or the job (Ctrl-C)."""


def after_signal(number: int) -> int:
    """Returns the exit status of a process that leaves an unfinished job because of signal
    ``number``."""
    return INTERRUPTED if number == signal.SIGINT else DRAINED
