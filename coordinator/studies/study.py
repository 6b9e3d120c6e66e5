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
from coordinator.tune.options import TuneArguments, option_arguments
from psrpc.core.errors import InvalidArgument, JobFailed, PsError
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
    """Runs a study as ``coordinator tune`` does, or on Spark; the same call with the same
    ``run_dir`` goes on with it.

    Args:
        job: the job file.
        space: ranges by setting; None for the ``search`` of the job file.
        run_dir: the directory of the study; None for a new one under ``runs``.
        spark: a ``SparkSession`` or ``SparkContext``: each trial is one task, whose executor runs
            its whole cluster. Driver and executors see ``job`` and ``run_dir``.
        options: fields of ``TuneArguments``, such as ``trials=20, parallel=2,
            metric="max:accuracy"``, and ``dashboard``: HOST:PORT, or None for no page. With
            ``on="ray"``, a Ray that this process is connected to runs the trials.

    Returns:
        The ``optuna.Study``, whose ``best_params`` and ``trials`` are those of the runs.

    Raises:
        InvalidArgument: an option, the space or the job cannot be used; nothing was started.
        JobFailed: more trials failed than ``max_failures``.
        LaunchFailed: the engine cannot run the trials.
        KeyboardInterrupt: Ctrl-C; trials under way are saved, and the same call goes on.
    """
    if find_spec("optuna") is None:
        raise missing("pserver.tune", "Optuna", "tune")
    path = new_study_directory(Path(job).stem) if run_dir is None else Path(run_dir)
    said = _arguments(space, options)
    if spark is not None and options.get("on") is not None:
        raise InvalidArgument(f"spark and on={options['on']!r} exclude each other; leave one out")
    if spark is None:
        if options.get("on") == "ray" and options.get("address") is None:
            said += _connected_ray()
        status = _run_command([str(job), "--run-dir", str(path), *said])
    else:
        there = [str(Path(job).absolute()), "--run-dir", str(path.absolute())]
        status = _run_on_spark(spark, [*there, *said])
    if status == INTERRUPTED:
        if not (path / JOURNAL).exists():
            raise KeyboardInterrupt("no trial was started")
        raise KeyboardInterrupt(
            f"the study in {path} is saved; the same call with run_dir={str(path)!r} goes on"
        )
    return load_study(path)


def _connected_ray() -> list[str]:
    """Returns the option with the address of the Ray that this process is connected to."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return [f"--address={ray.get_runtime_context().gcs_address}"]


def load_study(run_dir: str | Path) -> Any:
    """Returns the ``optuna.Study`` of a study's directory.

    Raises:
        InvalidJob: Optuna is missing.
        InvalidArgument: the directory has no study.
    """
    if find_spec("optuna") is None:
        raise missing("the study in a directory", "Optuna", "tune")
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
        if name == "dashboard":
            said += ["--no-dashboard"] if value is None else [f"--dashboard={value}"]
            continue
        name = {"timeout": "timeout_s"}.get(name, name)
        if name not in declared or name in ("space", "run_dir"):
            near = get_close_matches(name, [*declared, "dashboard"], 1)
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
    elif declared.kind != "list":
        try:
            declared.from_text(str(value))
        except NotThis as expected:
            raise InvalidArgument(f"{declared.name} is {value!r}; expected {expected}") from None
    elif isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    return option_arguments(declared, value)


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()


def _run_command(arguments: Sequence[str]) -> int:
    """Runs the command in a process that ends with this one, and passes each Ctrl-C on to it;
    returns its exit status, done or interrupted. Raises as :func:`tune` for others."""
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
        ended = False
        while not ended:
            try:
                for line in child.stderr:
                    lines.append(line.rstrip())
                    sys.stderr.write(line)
                status = child.wait()
                shown.join()
                ended = True
            except KeyboardInterrupt:
                # The command saves the study, or after a second one ends at once.
                child.send_signal(signal.SIGINT)
    if status in (DONE, INTERRUPTED):
        return status
    raise _error_of(status, lines)


def _run_on_spark(spark: Any, arguments: Sequence[str]) -> int:
    from coordinator.process.describing import DescribeFailed
    from coordinator.studies.spark_trials import run_on_spark

    try:
        status, reason = run_on_spark(spark, arguments)
    except DescribeFailed as error:
        # Its message is the whole output of the check, whose last line is the error.
        raise _error_of(BAD_INPUT, str(error).splitlines()) from None
    if status in (DONE, INTERRUPTED):
        return status
    raise JobFailed(reason)


def _error_of(status: int, lines: Sequence[str]) -> PsError:
    """Returns the error of a command that has ended with ``status`` and said ``lines``."""
    said = next((line for line in reversed(lines) if line.startswith("error ")), "")
    code, _, words = said.removeprefix("error ").partition(": ")
    words = words or f"`coordinator tune` ended with status {status}"
    kind = InvalidArgument if status == BAD_INPUT else JobFailed
    return kind(words, code=code)
