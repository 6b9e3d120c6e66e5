"""Studies from Python: ``pserver.tune("job.py", {"batch_size": space.choice(32, 64)})``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coordinator.search.space import Alternatives, Range, Value
from coordinator.tune.directory import JOURNAL, new_study_directory
from coordinator.tune.options import TuneArguments
from psrpc.core.errors import InvalidArgument, JobFailed
from psrpc.ops.exit_status import BAD_INPUT, DONE, INTERRUPTED
from psrpc.ops.extras import missing
from psrpc.ops.process import PARENT_PID, child_environment, module_command
from psrpc.options.declaration import NotThis, Option, options_of

SearchSpace = Mapping[str, Range | Sequence[Value] | str]
"""For each setting, a range of :mod:`pserver.space`, a list of values, or the text of a range."""


def tune(
    job: str | Path,
    space: SearchSpace | None = None,
    *,
    run_dir: str | Path | None = None,
    spark: Any = None,
    **options: object,
) -> Any:
    """Runs a study on this machine, as ``coordinator tune`` does, or on Spark; the same call with
    the same ``run_dir`` goes on with it.

    Args:
        job: the job file.
        space: ranges by setting; None for the ``search`` of the job file.
        run_dir: the directory of the study; None for a new one under ``runs``.
        spark: a ``SparkSession`` or ``SparkContext``: each trial is one task, whose executor runs
            its whole cluster. Driver and executors see ``job`` and ``run_dir``.
        options: fields of ``TuneArguments``, such as ``trials=20, parallel=2,
            metric="max:accuracy"``.

    Returns:
        The ``optuna.Study``, whose ``best_params`` and ``trials`` are those of the runs.

    Raises:
        InvalidArgument: an option, the space or the job cannot be used; nothing was started.
        JobFailed: more trials failed than ``max_failures``.
        LaunchFailed: Spark cannot run the trials.
        KeyboardInterrupt: Ctrl-C; trials under way are saved, and the same call goes on.
    """
    if find_spec("optuna") is None:
        raise missing("pserver.tune", "Optuna", "tune")
    path = new_study_directory(Path(job).stem) if run_dir is None else Path(run_dir)
    said = _arguments(space, options)
    if spark is None:
        _run_command([str(job), "--run-dir", str(path), *said])
    else:
        _run_on_spark(spark, [str(Path(job).absolute()), "--run-dir", str(path.absolute()), *said])
    return load_study(path)


def load_study(run_dir: str | Path) -> Any:
    """Returns the ``optuna.Study`` of a study's directory.

    Raises:
        InvalidArgument: the directory has no study.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    journal = Path(run_dir) / JOURNAL
    if not journal.is_file():
        raise InvalidArgument(f"{run_dir} holds no study (it has no {JOURNAL})")
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    [name] = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def _arguments(space: SearchSpace | None, options: Mapping[str, object]) -> list[str]:
    """Converts options given in Python to those of the command line. Raises InvalidArgument."""
    declared = {each.name: each for each in options_of(TuneArguments)}
    said = []
    for key, each in (space or {}).items():
        text = str(Alternatives(tuple(each))) if isinstance(each, list | tuple) else str(each)
        said += ["--space", f"{key}={text}"]
    for name, value in options.items():
        name = {"timeout": "timeout_s"}.get(name, name)
        if name not in declared or name in ("space", "run_dir"):
            near = get_close_matches(name, declared, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(declared)}"
            raise InvalidArgument(f"a study has no option {name!r}; {advice}")
        said += _option(declared[name], value)
    return said


def _option(declared: Option, value: Any) -> list[str]:
    if value is None or value == declared.default:
        return []
    if declared.kind == "flag":
        if not isinstance(value, bool):
            raise InvalidArgument(f"{declared.name} is {value!r}; expected True or False")
        return [declared.flag]
    values = value if isinstance(value, list | tuple) else [value]
    said = []
    for each in values:
        try:
            declared.from_text(str(each)) if declared.kind != "list" else None
        except NotThis as expected:
            raise InvalidArgument(f"{declared.name} is {value!r}; expected {expected}") from None
        said += [f"{declared.flag}={each}"]
    return said


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()


def _run_command(arguments: Sequence[str]) -> None:
    """Runs the command in a process that ends with this one. Passes a Ctrl-C on to it once."""
    child = subprocess.Popen(
        module_command("coordinator.cli", "tune", *arguments),
        env={**child_environment(os.environ), PARENT_PID: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        # Without a terminal, as in a notebook, `_show` copies the output to the caller's stream.
        stdout=None if sys.stdout.isatty() else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert child.stderr is not None
    with child:
        shown = threading.Thread(target=_show, args=(child.stdout or (),), daemon=True)
        shown.start()
        lines: list[str] = []
        try:
            for line in child.stderr:
                lines.append(line.rstrip())
                sys.stderr.write(line)
            status = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
        finally:
            shown.join()
    _raise_for(status, lines)


def _run_on_spark(spark: Any, arguments: Sequence[str]) -> None:
    from coordinator.process.describing import DescribeFailed
    from coordinator.tune.spark_trials import run_on_spark

    try:
        status, reason = run_on_spark(spark, arguments)
    except DescribeFailed as error:
        # Its message is the whole output of the check, whose last line is the error.
        _raise_for(BAD_INPUT, str(error).splitlines())
        raise
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status != DONE:
        raise JobFailed(reason)


def _raise_for(status: int, lines: Sequence[str]) -> None:
    """Raises the error of a command that has ended with ``status`` and said ``lines``."""
    if status == DONE:
        return
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    said = next((line for line in reversed(lines) if line.startswith("error ")), "")
    code, _, words = said.removeprefix("error ").partition(": ")
    words = words or f"`coordinator tune` ended with status {status}"
    if status == BAD_INPUT:
        raise InvalidArgument(words, code=code)
    raise JobFailed(words, code=code)
