"""Exports a checkpoint to a file that plain Keras or TensorFlow loads without this project."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psrpc.core.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidJob,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.files.remote import exists
from psrpc.files.remote_copies import upload
from psrpc.files.urls import location
from psrpc.ops.extras import check_tensorflow
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look
from worker.data.ragged import Ragged, as_tensor
from worker.data.source import Array, Batch, map_arrays
from worker.job.loader import job_module, load_job, only_while_loading, user_code
from worker.runtime.quiet import STDERR, STDOUT, import_tensorflow, redirected

FORMS = "MODEL.weights.h5, MODEL.keras or a directory (with / at its end) for a SavedModel"


@only_while_loading()
def export_main(job: str, checkpoint: str, to: str, settings: Sequence[str] = ()) -> int:
    """Builds the model of ``job``, assigns the values of ``checkpoint`` and writes it to ``to``.

    Returns:
        The exit status: 0, or 2 after one line on stderr.
    """
    try:
        save_name(to)
        first_look(Path(job), settings)
        check_tensorflow("`worker export`")
        import_tensorflow()
        # Keras prints many lines on stdout about the export.
        with redirected(STDOUT, STDERR):
            advice = export(job, Path(checkpoint), to, settings)
    except Exception as error:
        if isinstance(error, UserCodeFailed):
            sys.stderr.write(error.user_traceback)
        elif not isinstance(error, PsError):
            traceback.print_exc()
            error = PsError(f"the export of {job} to {to} failed: {type(error).__name__}: {error}")
        sys.stderr.write(error_line(error) + "\n")
        return 2
    if advice:
        sys.stdout.write(f"{advice}\n")
    return 0


def _advice(job: str, to: str, written: Path) -> str:
    """Returns how to load the export that was ``written``; empty if its name is enough.

    Raises:
        InvalidJob: Keras cannot load it.
    """
    from worker.export.check import how_served, loading, own_names, why_not_loaded

    if save_name(to) == "saved_model":
        call = how_served(written) if isinstance(location(to), Path) else ""
        # Two statements: the loaded object must not be collected before the call.
        return f"to use {to}: model = tf.saved_model.load({to!r}); {call}" if call else ""
    if save_name(to) != "keras":
        return ""
    module = job_module(Path(job).absolute())
    needed = own_names(written)
    options, refused = loading(written, module, needed)
    if refused and not options:
        raise InvalidJob(
            f"--to {to} would be a file that keras.models.load_model cannot load: "
            f"{why_not_loaded(written, module) or refused}; export a SavedModel (--to DIR/), or "
            "the values alone (--to MODEL.weights.h5) and load them into a model that is made as "
            "the job does and called on a batch, which builds its layers (build() may not): "
            "model(x); model.load_weights('MODEL.weights.h5'); or give the class a get_config(), "
            "or **kwargs in __init__ that it passes on"
        )
    own = f", custom_objects={_named(needed)}" if needed else ""
    if refused:
        given = "".join(f", {name}={value}" for name, value in options.items())
        return (
            f"keras.models.load_model({to!r}{own}) fails: {refused}; load it with "
            f"keras.models.load_model({to!r}{given}{own})"
        )
    if not needed:
        return ""
    return (
        f"{to} names the job's own objects; load it with keras.models.load_model({to!r}{own}); a "
        "SavedModel (--to DIR/) needs none of it"
    )


def _named(needed: list[str]) -> str:
    return f"{{{', '.join(f'{name!r}: {name}' for name in needed)}}}"


def export(job: str, checkpoint: Path, to: str, settings: Sequence[str] = ()) -> str:
    """Exports as :func:`export_main`; returns how to load the export, empty if its name is enough.

    Embedding tables are exported whole: as Keras's own Embedding in a Keras file, as variables in
    a SavedModel; growing tables only there. If the optimizer keeps moving averages of the
    parameters, these are exported, as Keras does at the end of ``fit``.

    Raises:
        InvalidJob: the job cannot be built, the checkpoint is of another model, or Keras cannot
            load the file.
        CheckpointError: the checkpoint cannot be read, or the operating system refused.
        InvalidArgument: ``to`` has no known form, or exists already.
        PsError: the export differs from the checkpoint; ``to`` is unchanged.
    """
    target = location(to)
    save_name(to)
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {str(checkpoint)!r}", code="PS404")
    _check_target(target, to)
    write = _writer(job, checkpoint, to, settings)
    try:
        # All or nothing: write next to the target, then rename.
        beside = target.parent if isinstance(target, Path) else None
        with tempfile.TemporaryDirectory(dir=beside, prefix=".export-") as folder:
            written = Path(folder) / Path(to).name
            write(written)
            # Keras loads the file to see whether it can: there need not be two models.
            del write
            advice = _advice(job, to, written)
            if isinstance(target, Path):
                written.rename(target)
            else:
                upload(written, target)
            return advice
    except OSError as error:
        raise CheckpointError(
            f"--to {to} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from error


def _writer(job: str, checkpoint: Path, to: str, settings: Sequence[str]) -> Callable[[Path], None]:
    """Returns the function that writes the model of ``job``, in the form of ``to``; it holds the
    model."""
    import keras

    from psrpc.checkpoint.checkpoint import exported_variables
    from psrpc.checkpoint.manifest import read_manifest
    from worker.embedding.lookups import holding
    from worker.export.check import check_held, check_written
    from worker.export.tables import plain_keras, whole_tables
    from worker.step.replica import Replica

    kind = save_name(to)
    manifest = read_manifest(checkpoint)
    values = exported_variables(checkpoint, manifest)
    tables, grown = whole_tables(checkpoint, manifest)
    # A SavedModel contains our layers' behaviour; Keras files need Keras's layers.
    with holding(tables if kind == "saved_model" else None, grown) as held:
        replica = Replica(load_job(job, settings).job)
    try:
        # ``held`` layers have their rows already. Shards do not know the names of their variables,
        # which two of them may share.
        replica.assign(values, but=[layer.embeddings for layer, _ in held])
    except InvalidArgument as error:
        raise InvalidJob(
            f"{checkpoint} does not fit the model of {job}: {error}", code="PS405"
        ) from None
    model = replica.model
    if tables and kind != "saved_model" and isinstance(model, keras.Model):
        model, held = plain_keras(model, tables, to)
    check_held(held, tables)
    if isinstance(model, keras.Model) and model.compiled and model.optimizer is None:
        # :func:`worker.model.compiled.complete` compiled it only for its losses. Keras cannot load
        # such a file, since it expects an optimizer's variables.
        model.compiled = False
    save = _saver(model, kind, to, _signature(replica.example), bool(tables))

    def write(path: Path) -> None:
        _write(save, path, to)
        check_written(path, kind, {name: tables[name] for _, name in held})

    return write


def _check_target(target: Path | str, to: str) -> None:
    there = target.exists() if isinstance(target, Path) else exists(target)
    if there:
        raise InvalidArgument(f"--to {to}: there is something already; remove it or choose another")
    if isinstance(target, Path) and not target.parent.is_dir():
        raise InvalidArgument(f"--to {to}: there is no directory {str(target.parent)!r}")


def _write(save: Callable[[Path], Any], path: Path, to: str) -> None:
    refused = None
    # This calls the user's layers for their configuration.
    with user_code(f"writing {to}"):
        try:
            save(path)
        except OSError as error:
            refused = error
    if refused is not None:
        raise refused


def save_name(to: str) -> str:
    """Returns the form that ``to`` asks for: ``weights``, ``keras`` or ``saved_model``."""
    name = Path(to).name
    if name.endswith(".weights.h5"):
        return "weights"
    if name.endswith(".keras"):
        return "keras"
    if to.endswith("/") or (name and "." not in name):
        return "saved_model"
    raise InvalidArgument(f"--to {to}: expected {FORMS}")


def _signature(example: Batch) -> list[Any]:
    """Returns the model's input specs. For a model of the user's own class, Keras would assume
    floats, which ids are not."""
    import tensorflow as tf

    def spec(array: Array | Ragged) -> tf.TypeSpec:
        tensor = as_tensor(array)
        shape = [None, *tensor.shape[1:]]
        if isinstance(array, Ragged):
            return tf.RaggedTensorSpec(shape, tensor.dtype, ragged_rank=1)
        return tf.TensorSpec(shape, tensor.dtype)

    return [map_arrays(spec, example[0])]


def _saver(
    model: Any, kind: str, to: str, signature: list[Any], by_example: bool
) -> Callable[[Path], Any]:
    """Returns the function that writes the model. Passes ``signature``, the specs of its inputs,
    to Keras if ``by_example``."""
    import keras
    import tensorflow as tf

    if isinstance(model, keras.Model):
        if kind == "weights":
            return lambda path: model.save_weights(path)
        if kind == "keras":
            return lambda path: model.save(path)
        if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(signature)):
            return lambda path: _export_ragged(model, path, signature)
        # Models that state their inputs need no signature.
        own = {} if not by_example or _says_inputs(model) else {"input_signature": signature}
        return lambda path: model.export(str(path), verbose=False, **own)
    if kind != "saved_model":
        raise InvalidArgument(
            f"--to {to} is a Keras file, but the model is a tf.Module; give a directory (with / at "
            "its end) for a SavedModel"
        )
    return lambda path: tf.saved_model.save(model, str(path))


def _export_ragged(model: Any, path: Path, signature: list[Any]) -> None:
    """Exports one endpoint ``serve``, since ``model.export`` accepts no ragged inputs."""
    import keras
    import tensorflow as tf

    serve = tf.function(lambda x: model(x), input_signature=signature)
    serve.get_concrete_function()
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve)
    archive.write_out(str(path), verbose=False)


def _says_inputs(model: Any) -> bool:
    """Whether the model states its inputs, as functional and sequential models do."""
    try:
        return bool(model.inputs)
    except (AttributeError, ValueError):
        return False
