"""The first values of a job's parameters."""

from __future__ import annotations

from pathlib import Path

import keras

from psrpc.checkpoint import load_variables
from psrpc.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.first_rows import shared_tables
from psrpc.logs import get_logger
from psrpc.manifest import read_manifest
from psrpc.plan import Plan
from worker.data import Array
from worker.job import Job
from worker.replica import Replica

log = get_logger()


def initial_values(replica: Replica, plan: Plan) -> dict[str, Array]:
    """What the shards are initialized with: arena name -> ``[length]``, aligned.

    The values that the model was built with, from the job's seed, or those of ``init_from``.

    Raises:
        InvalidJob: ``init_from`` cannot be read or does not fit the model.
    """
    if replica.job.init_from is not None:
        load_values(replica, Path(replica.job.init_from))
    return replica.values(plan)


def first_rows(job: Job, plan: Plan) -> str:
    """The directory of the checkpoint whose rows the tables of ``plan`` begin with, absolute; empty
    if there is none. Says in the log which tables begin with no rows although there is an
    ``init_from``.

    Raises:
        InvalidJob: it cannot be read, or has a table of the same name and another width.
    """
    if job.init_from is None or not plan.tables:
        return ""
    source = Path(job.init_from)
    found: set[int] = set()
    if source.is_dir():
        try:
            here = read_manifest(source).plan.tables
            found = set(shared_tables(here, plan.tables).values())
        except (CheckpointError, InvalidJob) as error:
            raise InvalidJob(f"init_from {str(source)!r}: {error}") from None
    for number, table in enumerate(plan.tables):
        if number not in found:
            log.warning("a table begins without rows", table=table.name, init_from=str(source))
    return str(source.resolve()) if found else ""


def load_values(replica: Replica, source: Path) -> None:
    """Gives the model the values of a Keras file or of a checkpoint directory.

    Raises:
        InvalidJob: it cannot be read or does not fit the model.
    """
    what = f"init_from {str(source)!r}"
    if source.is_dir():
        try:
            replica.assign(dict(load_variables(source)))
        except InvalidArgument as error:
            raise InvalidJob(f"{what}: {error}") from None
        return
    if not source.is_file():
        raise InvalidJob(f"{what}: there is no such file or directory in {Path.cwd()}")
    if not source.name.endswith((".keras", ".weights.h5")):
        raise InvalidJob(
            f"{what}: expected a .keras or .weights.h5 file, or the directory of a checkpoint"
        )
    if not isinstance(replica.model, keras.Model):
        raise InvalidJob(
            f"{what} is a Keras file, but the model is a tf.Module; give a checkpoint's directory"
        )
    try:
        # A .keras file too: its architecture is not needed, and custom code neither.
        replica.model.load_weights(source)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidJob(f"{what} does not fit the model: {reason}") from None
