"""``--set`` for settings of a job file itself: ``data = setting("data", "")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from psrpc.core.errors import InvalidJob, InvalidSetting
from worker.job.overrides import FIELDS, OPTIMIZER_PREFIX, kind_of, parsed

Value = TypeVar("Value", str, int, float, bool)


@dataclass(frozen=True)
class Offered:
    """The ``--set`` settings for a job file by name, and the names that it read."""

    texts: Mapping[str, str]
    asked: set[str] = field(default_factory=set)


_OFFERED: ContextVar[Offered | None] = ContextVar("_OFFERED", default=None)


@dataclass
class _Commands:
    """Counts the commands that run in this process; shared by all threads, some of which read
    data."""

    running: int = 0


_COMMANDS = _Commands()


def setting(name: str, default: Value) -> Value:
    """Returns the value of ``--set name=value`` for the job file that calls this, or ``default``.

    Parses the text as the type of ``default``: str, int, float or bool. The last setting of a name
    counts. While no job file is loading, say in a test that imports one, returns ``default``.

    Raises:
        InvalidJob: the text cannot be read, a field of the job has this name, or a function of the
            job file calls this after loading: a job's settings must be known before it runs.
    """
    if name in FIELDS or name.startswith(OPTIMIZER_PREFIX):
        raise InvalidJob(f"setting({name!r}): a job has this setting already; use another name")
    offered = _OFFERED.get()
    if offered is None:
        if _COMMANDS.running:
            raise InvalidSetting(
                f"setting({name!r}) is read after the job file was loaded; read it at the top of "
                "the file",
                code="PS104",
            )
        return default
    offered.asked.add(name)
    if name not in offered.texts:
        return default
    text = offered.texts[name]
    value: Value = parsed(f"{name}={text}", kind_of(default), text)
    return value


@contextmanager
def only_while_loading() -> Iterator[None]:
    """Marks a command that runs a job: within the block, :func:`setting` raises instead of
    returning its default, except while the job file is loading. Also a decorator."""
    _COMMANDS.running += 1
    try:
        yield
    finally:
        _COMMANDS.running -= 1


@contextmanager
def settings_for(settings: Iterable[str]) -> Iterator[Offered]:
    """Gives :func:`setting` these ``key=value`` settings within the block."""
    pairs = (setting.partition("=") for setting in settings)
    offered = Offered({key.strip(): text.strip() for key, equals, text in pairs if equals})
    token = _OFFERED.set(offered)
    try:
        yield offered
    finally:
        _OFFERED.reset(token)
