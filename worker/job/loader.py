"""Loads a user's job file with its settings, and separates the user's errors from ours."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.options.job_keys import UserCodeFailed, own_settings, read_job_file
from worker.job.job import Job
from worker.job.overrides import FIELDS, OPTIMIZER_PREFIX, kind_of, override_job, parsed

Value = TypeVar("Value", str, int, float, bool)

_TRACED = "in user code:"
_USED_TWICE = re.compile(r'The name "(.+)" is used \d+ times in the model\.')
_NAMES_AN_ERROR = r"[A-Za-z_.]*(Error|Exception)\b"
_WRAPPED = "Exception encountered when calling"
_COMPILED = re.compile(
    r"'(Symbolic|Keras)?Tensor' object has no attribute 'numpy'|not '(Symbolic|Keras)Tensor'"
    r"|Cannot convert a symbolic tf\.Tensor( \(\S+\) to a numpy array)?"
    r"|symbolic `tf\.Tensor` as a Python `bool`( is not allowed)?"
    r"|numpy\(\) is only available when eager execution is enabled"
)
"""Messages of TensorFlow and Keras about a tensor that has no value yet."""
_PACKAGES = ("coordinator", "pserver", "psrpc", "worker")
_OURS = (f"{Path(__file__).parents[2] / name}{os.sep}" for name in _PACKAGES)
# The code of a dataclass's own methods has the file "<string>".
_NOT_THE_USERS = (*_OURS, sysconfig.get_path("stdlib"), "<frozen ", "<string>")


@dataclass(frozen=True)
class LoadedJob:
    """A job, and its origin.

    Attributes:
        job: with all overrides applied, except those of ``optimizer.*``.
        path: of the job file, absolute.
        sha256: of the bytes that ran, in hex.
        name: of the file, without ``.py``.
        optimizer_arguments: overrides ``optimizer.*``, as text, for ``override_optimizer``.
        search: ranges of ``pserver.space`` as text, by setting: the file's ``search``.
    """

    job: Job
    path: Path
    sha256: str
    name: str
    optimizer_arguments: Mapping[str, str] = field(default_factory=dict)
    search: Mapping[str, str] = field(default_factory=dict)


def load_job(path: str | Path, settings: Sequence[str] = ()) -> LoadedJob:
    """Runs the file at ``path`` and returns its ``job``, with ``--set`` settings applied.

    Puts the file's folder first on ``sys.path``, so that the file can import its siblings. Every
    call runs the file again.

    Raises:
        InvalidJob: the file or its ``job`` does not exist, or a setting does not fit.
        UserCodeFailed: the file raised.
    """
    shown, path = str(path), Path(path).absolute()
    source = read_job_file(Path(shown))
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_code(f"job file {shown}"), settings_for(settings) as offered:
        module = _run(path, source)
    if not hasattr(module, "job"):
        guarded = b"__main__" in source
        where = ', outside of `if __name__ == "__main__"`, which is not run' if guarded else ""
        raise InvalidJob(f"{shown} defines no job; add: job = Job(...){where}")
    job = module.job
    if not isinstance(job, Job):
        raise InvalidJob(
            f"job in {shown} is a {type(job).__name__}; expected a worker.Job: job = Job(...)"
        )
    unread = own_settings(path) - offered.asked
    job, arguments = override_job(job, settings, offered.asked, unread)
    # Any other `search` of the file is its own.
    found = getattr(module, "search", None)
    search = {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
    sha256 = hashlib.sha256(source).hexdigest()
    return LoadedJob(job, path, sha256, path.stem, arguments, search)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns an exception of the user's code into :class:`UserCodeFailed`: ``what`` raised it.

    Our own :class:`InvalidJob` passes, with ``what`` before its message.
    """
    try:
        yield
    except UserCodeFailed:
        raise
    except InvalidJob as error:
        reason = str(error)
        if reason.startswith(_TRACED):
            reason = reason.strip().splitlines()[-1].strip().removeprefix("InvalidJob: ")
        raise InvalidJob(f"{what}: {reason}", code=error.code) from None
    except (Exception, SystemExit) as error:
        raise UserCodeFailed(f"{what} raised {_reason(error)}", _user_text(error)) from None


def _user_text(error: BaseException) -> str:
    """Returns the traceback with the frames of the user's code alone. Empty without such a frame:
    then a library refused a value of the job, and its message says why."""
    if str(error).startswith(_TRACED):
        # TensorFlow compiled the user's code; its message contains the frames.
        frames = re.findall(r'( *File "(.*)", line .*\n(?: {6,}.*\n)*)', str(error))
        shown = [text for text, name in frames if not _is_library(name)]
        return f"{_TRACED}\n{''.join(shown)}\n" if shown else ""
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    own = [frame for frame in told.stack if not _is_library(frame.filename)]
    if not own and not isinstance(error, SyntaxError):
        return ""
    told.stack = traceback.StackSummary.from_list(own)
    return "".join(told.format())


def _is_library(filename: str) -> bool:
    """Whether a file belongs to us, TensorFlow or Python rather than to the user."""
    return filename.startswith(_NOT_THE_USERS) or any(
        part in filename for part in ("site-packages", "__autograph_generated_file")
    )


def _reason(error: BaseException) -> str:
    """Returns class and message of an exception in one line, without the text that Keras
    ("Exception encountered when calling ...") and TensorFlow (frames) put before it."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return type(error).__name__
    prefix = f"{type(error).__name__}: "
    if lines[0] == _TRACED:
        errors = [at for at, line in enumerate(lines) if re.match(_NAMES_AN_ERROR, line)]
        lines, prefix = lines[errors[-1] if errors else -1 :], ""
    reason = lines[0]
    if _WRAPPED in reason:
        # Keras puts the cause a line further down, two lines down if it could not infer a spec.
        reason = " ".join(lines[: 3 if "".join(lines[1:2]).endswith("Error encountered:") else 2])
    if compiled := _COMPILED.search(reason):
        where = _last_line(error)
        return (
            f"{prefix}{reason[: compiled.end()]}{f' in {where}' if where else ''}: it is compiled "
            "(tf.function) before tensors have values, so .numpy(), float(), bool() and NumPy's "
            "functions cannot be used there; use keras.ops or tf"
        )
    if twice := _USED_TWICE.match(reason):
        # For example an input and the table of its ids.
        reason += (
            " Inputs and layers share these names: give one of them another. In worker.Embedding "
            f"table={twice[1]!r} names the table alone; layers that say the same share it"
        )
    return prefix + reason


def _last_line(error: BaseException) -> str:
    """Returns the innermost line of the user's code, ``job.py, line 12``; empty if none."""
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'File "(.*)", line (\d+)', str(error))
    own = [(Path(name).name, line) for name, line in frames if not _is_library(name)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else ""


class _BytesLoader(SourceLoader):
    """Runs exactly the bytes that were hashed; never a cached ``.pyc``."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:  # noqa: ARG002
        return self._source


def job_module(path: Path) -> ModuleType:
    """Returns the module of the last loaded job file of this name."""
    return sys.modules[_module_name(path)]


def _module_name(path: Path) -> str:
    """Returns a name that hides no real module, even for a file keras.py."""
    return f"_job_{path.stem}"


def _run(path: Path, source: bytes) -> ModuleType:
    name = _module_name(path)
    loader = _BytesLoader(path, source)
    spec = spec_from_loader(name, loader, origin=str(path))
    assert spec is not None  # a SourceLoader always gives one
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


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
