"""Calls to remote stores, with deadlines, retries and log lines."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from psrpc.core.errors import InvalidData, PsError, Unreachable
from psrpc.ops.clock import MonotonicClock
from psrpc.ops.extras import CODE as NOT_INSTALLED
from psrpc.ops.extras import install_command
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import Announcer, GaveUp, RetryPolicy, retry

Result = TypeVar("Result")

CODE = "PS109"
"""Error code of an unusable store."""

CALL_S = 60.0
"""Deadline of one call."""

_PATIENCE = RetryPolicy(first_s=0.2, longest_s=5.0, budget_s=300.0)
_process = {"patience": _PATIENCE}

_LASTING = {
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EPERM,
    getattr(errno, "EREMCHG", errno.EPERM),  # of s3fs: the bucket is in another region
}
"""errno values of errors that a retry cannot fix."""

_PASSING = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ClientResponseError",
    "ConnectionError",
    "HTTPClientError",
    "HttpError",
    "IncompleteRead",
    "ResponseParserError",
}
"""Error classes of aiohttp, botocore and gcsfs that are not OSErrors and that a retry may fix."""

_PACKAGES = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hdfs": "pyarrow",
    "s3": "s3fs",
    "s3a": "s3fs",
}
"""Protocol -> the package that it needs in addition to fsspec."""

_CREDENTIALS = {"CredentialRetrievalError", "NoCredentialsError", "PartialCredentialsError"}
"""Error classes of botocore for missing or incomplete credentials."""

log = get_logger()


class NotThere(InvalidData):
    """The store answers that it has no such file."""


def give_up_after(budget_s: float) -> None:
    """Sets how long this process retries a store that does not answer; the default is 5 minutes."""
    patience = _PATIENCE
    _process["patience"] = RetryPolicy(patience.first_s, patience.longest_s, budget_s)


def call(url: str, function: Callable[[], Result], deadline_s: float = CALL_S) -> Result:
    """Returns the result of ``function``, an idempotent call about ``url``. Retries it after
    transient errors, and logs the wait.

    Raises:
        NotThere: there is no such file.
        InvalidData: access is denied, or the store is unreachable or refuses; says which.
    """
    clock = MonotonicClock()
    waiting = Announcer(
        lambda reason, waited_s: log.info(
            "waiting", waiting_for=reason, waited_s=round(waited_s), url=url
        )
    )

    def once() -> Result:
        return _bounded(url, function, deadline_s, waiting, clock)

    def give_up(gave_up: GaveUp) -> PsError:
        return InvalidData(f"{url} cannot be reached: {gave_up}", code=CODE)

    return retry(
        once,
        _process["patience"],
        give_up,
        stop=threading.Event(),
        announce=lambda reason: waiting.waiting(reason, clock.now()),
    )


def _bounded(
    url: str,
    function: Callable[[], Result],
    deadline_s: float,
    waiting: Announcer,
    clock: MonotonicClock,
) -> Result:
    """Runs ``function`` on a new thread, which is abandoned after the deadline. This is needed
    because libraries for stores have timeouts for single packets, not for a whole call."""
    future: Future[Result] = Future()
    threading.Thread(target=_run, args=(function, future), name="store", daemon=True).start()
    until = clock.now() + deadline_s
    while not wait([future], timeout=min(1.0, max(0.0, until - clock.now()))).done:
        if clock.now() >= until:
            raise Unreachable(f"no answer within {deadline_s:.0f} s")
        waiting.waiting("an answer of the store", clock.now())
    error = future.exception()
    if error is None:
        return future.result()
    raise translated(url, error) from error


def _run(function: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def translated(url: str, error: BaseException) -> PsError:
    """Translates a library's error about ``url`` into an error of this project."""
    if isinstance(error, PsError):
        return error
    names = {cls.__name__ for cls in type(error).__mro__}
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        package = _PACKAGES.get(url.partition("://")[0], "")
        more = f" {package}" if package not in ("", "s3fs") else ""
        return InvalidData(
            f"{url} needs a package that is not installed in {sys.prefix} ({reason}): "
            f"{install_command('remote')}{more}",
            code=NOT_INSTALLED,
        )
    if isinstance(error, FileNotFoundError):
        return NotThere(f"there is no file {url!r}")
    if isinstance(error, PermissionError) or names & _CREDENTIALS or _status(error) in (401, 403):
        return InvalidData(
            f"{url}: access is denied ({reason}); every process that reads or writes it needs "
            "credentials that may, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            code=CODE,
        )
    if _may_pass(error, names):
        return Unreachable(f"{type(error).__name__}: {reason}")
    return InvalidData(f"{url} cannot be used: {type(error).__name__}: {reason}", code=CODE)


def _may_pass(error: BaseException, names: set[str]) -> bool:
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    status = _status(error)
    return bool(names & _PASSING) and (status is None or status == 429 or status >= 500)


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status in an error of aiohttp or gcsfs, if any."""
    for name in ("status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None
