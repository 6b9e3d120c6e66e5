"""Provides the first values of a job's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import keras

from psrpc.checkpoint.choice import newest_good
from psrpc.checkpoint.initial_values import checkpoint_here, dense_files, shared_tables
from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.core.names import CHECKPOINTS
from psrpc.core.plan import Plan, VariableSpec
from psrpc.files.urls import location
from psrpc.ops.logs import get_logger
from worker.data.files import existing_file, local_copy
from worker.data.source import Array
from worker.job.job import Job
from worker.step.replica import Replica, in_list

log = get_logger()

_KERAS_FILES = (".keras", ".weights.h5")


@cache
def source_of(init_from: str | Path) -> Path | str:
    """Returns the Keras file or checkpoint of ``init_from``; for a run directory its newest good
    checkpoint, which stays the same during this process.

    Raises:
        InvalidJob: the directory is neither, or the run has no good checkpoint.
    """
    place = location(init_from)
    if not isinstance(place, Path):
        _check_stored(place)
        return place
    if not place.is_dir() or (place / MANIFEST).is_file():
        return place
    checkpoints = place / CHECKPOINTS
    if not checkpoints.is_dir():
        raise InvalidJob(
            f"init_from {str(place)!r} is neither a checkpoint (it has no {MANIFEST}) nor a run "
            f"directory (it has no {CHECKPOINTS})"
        )
    try:
        chosen = newest_good(checkpoints)
    except CheckpointError as error:
        raise InvalidJob(f"init_from {str(place)!r}: {error}") from None
    log.info("init_from a run", checkpoint=str(chosen.directory))
    return chosen.directory


def _check_stored(url: str) -> None:
    if url.endswith(_KERAS_FILES):
        return
    try:
        with checkpoint_here(url):
            pass  # its manifest is readable
    except CheckpointError as error:
        raise InvalidJob(
            f"init_from {url!r}: {error}; by URL, give a .keras or .weights.h5 file or the "
            "directory of one checkpoint"
        ) from None


def initial_values(replica: Replica, plan: Plan, first_rows: str = "") -> dict[str, Array]:
    """Returns the shards' first values: arena name -> ``[length]``, aligned.

    These are the model's values from the job's seed, or those of ``init_from``. A non-empty
    ``first_rows`` is the checkpoint that ``init_from`` meant when the job was described; a running
    run may have a newer one by now.

    Raises:
        InvalidJob: ``init_from`` cannot be read or does not fit the model.
    """
    if replica.job.init_from is not None:
        load_values(replica, first_rows or replica.job.init_from)
    return replica.values(plan)


def first_rows(job: Job, plan: Plan) -> str:
    """Returns the absolute directory of the checkpoint with the first rows of the tables; empty if
    there is none. Logs which tables begin without rows despite ``init_from``.

    Raises:
        InvalidJob: it cannot be read, or has a table of the same name and another width.
    """
    if job.init_from is None or not plan.tables:
        return ""
    source = source_of(job.init_from)
    found: set[int] = set()
    # A Keras file has no rows, so a remote one need not be copied.
    if not str(source).endswith(_KERAS_FILES) or isinstance(source, Path):
        try:
            with _here(source) as directory:
                if directory.is_dir():
                    here = read_manifest(directory).plan.tables
                    found = set(shared_tables(here, plan.tables).values())
        except (CheckpointError, InvalidJob) as error:
            raise InvalidJob(f"init_from {str(source)!r}: {error}") from None
    for number, table in enumerate(plan.tables):
        if number not in found:
            log.warning("a table begins without rows", table=table.name, init_from=str(source))
    if not found:
        return ""
    return str(source.resolve()) if isinstance(source, Path) else source


@contextmanager
def _here(
    source: Path | str, wanted: Callable[[Manifest], Iterable[str]] = lambda _manifest: ()
) -> Iterator[Path]:
    """Yields a local path: ``source`` itself, or a copy of the file or checkpoint at the URL. The
    copy of a checkpoint has its manifest and the ``wanted`` files."""
    if isinstance(source, Path):
        yield source
    elif source.endswith(_KERAS_FILES):
        with local_copy(existing_file("init_from", source)) as path:
            yield path
    else:
        with checkpoint_here(source, wanted) as directory:
            yield directory


def load_values(replica: Replica, init_from: str | Path) -> None:
    """Assigns the values of a Keras file or checkpoint directory to the model. Raises InvalidJob if
    they cannot be read or do not fit."""
    place = source_of(init_from)
    with _here(place, dense_files) as source:
        _load(replica, source, f"init_from {str(place)!r}")


def check_fits(model: Any, variables: Sequence[VariableSpec], init_from: str | Path) -> None:
    """Checks that ``init_from`` has values for these variables: of a checkpoint by names and
    shapes. Loads a local Keras file; leaves one at a URL to the worker, which needs it anyway.
    Raises InvalidJob if it cannot be read or does not fit the model."""
    place = source_of(init_from)
    if isinstance(place, str) and place.endswith(_KERAS_FILES):
        return
    what = f"init_from {str(place)!r}"
    with _here(place) as source:
        if not source.is_dir():
            _load_keras(model, source, what)
            return
        try:
            there = read_manifest(source).plan.variables
        except CheckpointError as error:
            raise InvalidJob(f"{what}: {error}") from None
    differences = _differences(variables, there)
    if differences:
        raise InvalidJob(f"{what} is of another model: {'; '.join(differences)}")


def _differences(ours: Sequence[VariableSpec], theirs: Sequence[VariableSpec]) -> list[str]:
    """Returns why a checkpoint's values do not fit the model; extra values are fine."""
    shapes = {spec.name: spec.shape for spec in theirs}
    missing = [spec.name for spec in ours if spec.name not in shapes]
    spare = sorted(shapes.keys() - {spec.name for spec in ours})
    found = [
        f"{spec.name} has shape {shapes[spec.name]} there and {spec.shape} in the model"
        for spec in ours
        if shapes.get(spec.name, spec.shape) != spec.shape
    ]
    if missing:
        found.insert(0, f"it has no values for {in_list(missing)}")
        if spare:
            found.insert(1, f"it has {in_list(spare)}, which the model has not")
    return found


def _load(replica: Replica, source: Path, what: str) -> None:
    if not source.is_dir():
        _load_keras(replica.model, source, what)
        return
    try:
        replica.assign(dict(load_variables(source)))
    except (CheckpointError, InvalidArgument) as error:
        raise InvalidJob(f"{what}: {error}") from None


def _load_keras(model: Any, source: Path, what: str) -> None:
    if not source.is_file():
        raise InvalidJob(f"{what}: there is no such file or directory in {Path.cwd()}")
    if not source.name.endswith(_KERAS_FILES):
        raise InvalidJob(
            f"{what}: expected a .keras or .weights.h5 file, or the directory of a checkpoint or "
            "of a run"
        )
    if not isinstance(model, keras.Model):
        raise InvalidJob(
            f"{what} is a Keras file, but the model is a tf.Module; give a checkpoint's directory"
        )
    try:
        # Also right for a .keras file: this needs neither its architecture nor custom code.
        model.load_weights(source)
    except (ValueError, OSError, KeyError) as error:
        raise InvalidJob(f"{what} does not fit the model: {_keras_reason(error)}") from None


def _keras_reason(error: Exception) -> str:
    """Returns in one line why Keras cannot load weights: the differing layers and shapes if stated,
    otherwise Keras's message without values of variables."""
    text = " ".join(_VALUES.sub("", str(error)).split())
    shapes, path = _SHAPES.search(text), _PATH.search(text)
    *_, unloaded = text.split("List of objects that could not be loaded:")
    layers = _LAYER.findall(unloaded)
    if not (shapes and path and layers):
        return text
    ours, theirs = shapes.groups()
    names = "layer" if len(layers) == 1 else "layers"
    return (
        f"{path[1]} has shape {theirs} there and {ours} in the model; the file does not fit "
        f"{names} {in_list(layers)}"
    )


_VALUES = re.compile(r", value=\[.*?\](?=>)", re.DOTALL)
_SHAPES = re.compile(r"variable\.shape=(\(.*?\)), Received: value\.shape=(\(.*?\))")
_PATH = re.compile(r"<Variable path=([^,>]+)")
_LAYER = re.compile(r"<\w+ name=([^,>]+)")
"""Patterns of Keras's message; a message of another form is shown as it is."""
