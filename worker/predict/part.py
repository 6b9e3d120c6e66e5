"""One part of an ``evaluate`` or ``predict``: ``python -m worker.predict.part FOLDER INDEX COUNT``.

The caller has written the folder: ``worker.handover.models.hand_over`` the model,
``worker.predict.spec.write_parts_spec`` the rest. ``coordinator.launch.parts`` starts it, and
``worker.predict.results`` says where it puts its result.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from psrpc.core.errors import PsError, error_line
from psrpc.ops.exit_status import DONE, FAILED
from psrpc.ops.process import die_with_parent, leave, quiet_grpc
from psrpc.options.job_keys import UserCodeFailed
from worker.runtime.quiet import import_tensorflow


def main() -> NoReturn:
    """Computes the part of the command line; ends the process with 0, or 1 after a line that says
    why."""
    die_with_parent()
    quiet_grpc()
    folder, index, count = sys.argv[1:]
    try:
        import_tensorflow()
        compute_part(Path(folder), int(index), int(count))
    except PsError as error:
        if isinstance(error, UserCodeFailed):
            sys.stderr.write(error.user_traceback)
        sys.stderr.write(error_line(error) + "\n")
        leave(FAILED)
    leave(DONE)


def compute_part(folder: Path, index: int, count: int) -> None:
    """Computes part ``index`` of ``count`` and writes its result; once per process.

    Raises:
        InvalidJob: the model cannot be made again.
        UserCodeFailed: the model, or code of the data, has raised.
    """
    import keras
    import tensorflow as tf

    from worker.embedding.lookups import look_up
    from worker.embedding.model_tables import MappedTables
    from worker.handover.models import take_over
    from worker.job.loader import user_code
    from worker.predict.results import metric_states, save_result
    from worker.predict.shares import Share
    from worker.predict.spec import DATA, TABLES, read_parts_spec, share
    from worker.runtime.devices import choose_gpus, configure_devices
    from worker.stored.stored_data import open_stored

    spec = read_parts_spec(folder)
    there = len(tf.config.list_physical_devices("GPU"))
    gpus = choose_gpus("all" if spec.gpu == "auto" and there else spec.gpu, there)
    configure_devices(
        str(gpus[index % len(gpus)]) if gpus else "none",
        memory_fraction=spec.gpu_memory_fraction,
        intra_op_threads=spec.intra_op_threads,
    )
    with user_code("the model"):
        model = take_over(folder)
    model.run_eagerly = spec.run_eagerly
    batches = share(spec.data["steps"], index, count)
    source = open_stored(folder / DATA, spec.data)
    data = Share(source, batches, spec.data["batch_size"], spec.data["records"])
    tables = MappedTables(folder / TABLES)
    with user_code(f"{spec.what}()"), look_up(tables):
        if spec.what == "predict":
            # Keras's own method: an override in the model's class has run in the caller.
            result = keras.Model.predict(model, data, verbose=0)
        else:
            keras.Model.evaluate(model, data, verbose=0)
            result = metric_states(model)
    save_result(folder, index, result)


if __name__ == "__main__":
    main()
