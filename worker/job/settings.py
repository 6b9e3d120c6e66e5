"""``--set`` for what a job file itself wants to know: ``data = setting("data", "")``."""

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
    """What ``--set`` said when a job file is loaded, by name, and the names that it asked for."""

    texts: Mapping[str, str]
    asked: set[str] = field(default_factory=set)


_OFFERED: ContextVar[Offered | None] = ContextVar("_OFFERED", default=None)


@dataclass
class _Commands:
    """Those that run in this process, for all its threads: data is read in some of their own."""

    running: int = 0


_COMMANDS = _Commands()


def setting(name: str, default: Value) -> Value:
    """The value of ``--set name=value`` for the job file that calls this, or ``default``.

    The text is read as what ``default`` is: a str, int, float or bool. Of one name the last setting
    counts. Called while no job file is loaded, say in a test that imports one, it is ``default``.

    Raises:
        InvalidJob: the text cannot be read, or a field of the job has this name; or it is called
            after the job file was loaded, by a function in it: the settings that a job has would
            not be known before it runs.
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
    """Within the block, a command that runs a job, :func:`setting` has no silent default: it is
    refused but while the job file is loaded. Also a decorator."""
    _COMMANDS.running += 1
    try:
        yield
    finally:
        _COMMANDS.running -= 1


@contextmanager
def settings_for(settings: Iterable[str]) -> Iterator[Offered]:
    """:func:`setting` finds ``key=value`` settings within the block."""
    pairs = (setting.partition("=") for setting in settings)
    offered = Offered({key.strip(): text.strip() for key, equals, text in pairs if equals})
    token = _OFFERED.set(offered)
    try:
        yield offered
    finally:
        _OFFERED.reset(token)
