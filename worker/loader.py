"""Loads a user's job file, and tells the user's errors from ours."""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, TracebackType

from psrpc.errors import InvalidJob
from worker.job import Job
from worker.overrides import override_job

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True)
class LoadedJob:
    """A job, and where it came from.

    Attributes:
        job: with all overrides but those of ``optimizer.*`` applied.
        path: of the job file, absolute.
        sha256: of the bytes that were run, in hex.
        name: of the file, without ``.py``.
        optimizer_arguments: overrides ``optimizer.*``, as text, for ``override_optimizer``.
    """

    job: Job
    path: Path
    sha256: str
    name: str
    optimizer_arguments: Mapping[str, str] = field(default_factory=dict)


class UserCodeFailed(InvalidJob):
    """Code of the job file raised. The message is one line; ``user_traceback`` is the text of the
    traceback from the user's first frame on, to be shown before it."""

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


def load_job(path: str | Path, settings: Sequence[str] = ()) -> LoadedJob:
    """Runs the file at ``path`` and takes its ``job``, with ``--set`` settings applied.

    The file's folder comes first on ``sys.path``, so that it can import its siblings. Every call
    runs the file anew.

    Raises:
        InvalidJob: no such file, no ``job`` in it, or a setting that does not fit.
        UserCodeFailed: the file raised.
    """
    shown, path = str(path), Path(path).absolute()
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise InvalidJob(f"there is no job file {shown!r} (in {Path.cwd()})") from None
    except OSError as error:
        raise InvalidJob(f"the job file {shown!r} cannot be read: {error.strerror}") from None
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_code(f"job file {shown}"):
        module = _run(path, source)
    if not hasattr(module, "job"):
        raise InvalidJob(f"{shown} defines no job; add: job = Job(...)")
    job = module.job
    if not isinstance(job, Job):
        raise InvalidJob(
            f"job in {shown} is a {type(job).__name__}; expected a worker.Job: job = Job(...)"
        )
    job, arguments = override_job(job, settings)
    return LoadedJob(job, path, hashlib.sha256(source).hexdigest(), path.stem, arguments)


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
        raise InvalidJob(f"{what}: {error}") from None
    except (Exception, SystemExit) as error:
        trace = _from_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace)) if trace else ""
        raise UserCodeFailed(f"{what} raised {_reason(error)}", text) from None


def _from_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames, ours and the importer's, that led to the user's code. None
    where no frame is the user's: then a library refused what the job gave it, and says why."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((_OWN, "<frozen importlib")):
            break
        trace = trace.tb_next
    rest = trace
    while rest is not None and "site-packages" in rest.tb_frame.f_code.co_filename:
        rest = rest.tb_next
    return trace if rest is not None else None


def _reason(error: BaseException) -> str:
    """Class and message of an exception in one line, without the wrapping of Keras and TensorFlow:
    the first puts "Exception encountered when calling ..." before it, the second the frames."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return type(error).__name__
    reason = lines[0]
    if reason == "in user code:":
        said = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)]
        return said[-1] if said else lines[-1]
    if reason.startswith("Exception encountered when calling") and len(lines) > 1:
        reason += " " + lines[1]
    return f"{type(error).__name__}: {reason}"


class _BytesLoader(SourceLoader):
    """Runs exactly the bytes that were hashed; never a cached ``.pyc``."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:  # noqa: ARG002
        return self._source


def _run(path: Path, source: bytes) -> ModuleType:
    # A name that hides no real module, even if the file is called keras.py.
    name = f"_job_{path.stem}"
    loader = _BytesLoader(path, source)
    spec = spec_from_loader(name, loader, origin=str(path))
    assert spec is not None  # a SourceLoader always gives one
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    loader.exec_module(module)
    return module
