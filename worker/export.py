"""A checkpoint as a file that plain Keras or TensorFlow loads without this project."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pserver.updates.allowlist import AVERAGES
from psrpc.errors import CheckpointError, InvalidArgument, InvalidJob, PsError
from worker.loader import UserCodeFailed, load_job
from worker.quiet import STDERR, STDOUT, import_tensorflow, redirected

FORMS = "MODEL.weights.h5, MODEL.keras or a directory (with / at its end) for a SavedModel"


def export_main(job: str, checkpoint: str, to: str, settings: Sequence[str] = ()) -> int:
    """Builds the model of ``job``, gives it the values of ``checkpoint`` and writes it to ``to``.

    Returns:
        The exit status: 0, or 2 after one line on stderr.
    """
    try:
        save_name(to)
        import_tensorflow()
        # Keras tells on stdout what it exports, in many lines.
        with redirected(STDOUT, STDERR):
            export(job, Path(checkpoint), to, settings)
    except PsError as error:
        if isinstance(error, UserCodeFailed):
            sys.stderr.write(error.user_traceback)
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def export(job: str, checkpoint: Path, to: str, settings: Sequence[str] = ()) -> None:
    """See :func:`export_main`.

    Where the optimizer keeps moving averages of the parameters, they are what is exported, as
    Keras does at the end of ``fit``.

    Raises:
        InvalidJob: the job cannot be built, or the checkpoint is of another model.
        CheckpointError: the checkpoint cannot be read.
        InvalidArgument: ``to`` is no form that can be written, or is there already.
    """
    from psrpc.checkpoint import load_variables
    from psrpc.manifest import read_manifest
    from worker.replica import Replica

    kind = save_name(to)
    target = Path(to)
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {str(checkpoint)!r}")
    if kind == "saved_model" and target.exists():
        raise InvalidArgument(f"--to {to}: there is something already; remove it or choose another")
    if not target.parent.is_dir():
        raise InvalidArgument(f"--to {to}: there is no directory {str(target.parent)!r}")
    # Before the first update there are no averages yet, only the zeros they start from.
    averages = AVERAGES if read_manifest(checkpoint).global_step else None
    values = load_variables(checkpoint, prefer_slot=averages)
    replica = Replica(load_job(job, settings).job)
    try:
        replica.assign(values)
    except InvalidArgument as error:
        raise InvalidJob(f"{checkpoint} does not fit the model of {job}: {error}") from None
    save = _saver(replica.model, kind, to)
    # Whole or not at all: written beside its place and moved there.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        written = Path(folder) / target.name
        save(written)
        written.rename(target)


def save_name(to: str) -> str:
    """What ``to`` asks for: ``weights``, ``keras`` or ``saved_model``."""
    name = Path(to).name
    if name.endswith(".weights.h5"):
        return "weights"
    if name.endswith(".keras"):
        return "keras"
    if to.endswith("/") or (name and "." not in name):
        return "saved_model"
    raise InvalidArgument(f"--to {to}: expected {FORMS}")


def _saver(model: Any, kind: str, to: str) -> Callable[[Path], Any]:
    import keras
    import tensorflow as tf

    if isinstance(model, keras.Model):
        if kind == "weights":
            return lambda path: model.save_weights(path)
        if kind == "keras":
            return lambda path: model.save(path)
        return lambda path: model.export(str(path), verbose=False)
    if kind != "saved_model":
        raise InvalidArgument(
            f"--to {to} is a Keras file, but the model is a tf.Module; give a directory (with / at "
            "its end) for a SavedModel"
        )
    return lambda path: tf.saved_model.save(model, str(path))
