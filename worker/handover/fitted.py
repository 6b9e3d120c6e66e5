"""The job of a ``fit``. Its job file lies in the folder that the caller has written, beside model,
data and settings."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from worker.data.source import Batch, arrays_of, map_arrays
from worker.handover.models import take_over
from worker.handover.spec import EVAL, TRAIN, read_spec
from worker.job.job import Job
from worker.stored.objects import load_object, save_object
from worker.stored.stored_data import open_stored

SAMPLE = "sample.pkl"
"""File of the first record of the training data. It stays when the data is removed."""

_JOB_FILE = """# Written by pserver.Cluster: the job of a call of fit.
from pathlib import Path

from worker.handover.fitted import fit_job

job = fit_job(Path(__file__).parent)
"""


def write_job_file(folder: Path) -> Path:
    """Writes the job file of the ``fit`` in ``folder``; returns its path."""
    path = folder / "fit.py"
    path.write_text(_JOB_FILE)
    return path


def write_sample(folder: Path, sample: Batch) -> None:
    """Writes some records of the training data, for :class:`EndedData`."""
    save_object(folder / SAMPLE, sample)


class EndedData:
    """The training data of a ``fit`` that has ended: some records, for an export of its model."""

    quick = False

    def __init__(self, folder: Path) -> None:
        """Raises InvalidData if :func:`write_sample` has written none in ``folder``."""
        self._folder = folder
        self._sample: Batch = load_object(folder / SAMPLE)

    @property
    def num_records(self) -> int:
        """See :class:`worker.data.source.DataSource`, also for the methods."""
        return len(next(arrays_of(self._sample)))

    def read(self, _seed: int, _batch: BatchId) -> NoReturn:
        raise InvalidData(
            f"train: the data of the fit in {str(self._folder)!r} went with its end; call fit "
            "again, it writes them anew"
        )

    def read_range(self, start: int, stop: int) -> Batch:
        batch: Batch = map_arrays(lambda array: array[start:stop], self._sample)
        return batch

    def fingerprint(self) -> str:
        return "ended"

    def close(self) -> None:
        pass


def fit_job(folder: Path) -> Job:
    """Returns the job of the ``fit`` whose model, data and settings are in ``folder``, where
    :func:`worker.handover.models.hand_over`, :func:`worker.stored.stored_data.store` and
    :func:`worker.handover.spec.write_spec` have written them.

    Raises:
        InvalidJob: a part of them is missing.
    """
    spec = read_spec(folder)
    over = not (folder / TRAIN).exists() and (folder / SAMPLE).exists()
    return Job(
        model=lambda: take_over(folder),
        train=EndedData(folder) if over else open_stored(folder / TRAIN, spec.train),
        eval=None if spec.eval is None or over else open_stored(folder / EVAL, spec.eval),
        class_weight=spec.class_weight,
        batch_size=spec.batch_size,
        epochs=spec.epochs,
        **{"seed": spec.seed, **spec.fields},
    )
