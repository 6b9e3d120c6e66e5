"""The job of a ``fit``. Its job file lies in the folder that the caller has written, beside model,
data and settings."""

from __future__ import annotations

from pathlib import Path

from worker.handover.models import take_over
from worker.handover.spec import EVAL, TRAIN, read_spec
from worker.job.job import Job
from worker.stored.stored_data import open_stored

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


def fit_job(folder: Path) -> Job:
    """Returns the job of the ``fit`` whose model, data and settings are in ``folder``: what
    :func:`worker.handover.models.hand_over`, :func:`worker.stored.stored_data.store` and
    :func:`worker.handover.spec.write_spec` have written there.

    Raises:
        InvalidJob: something of that is missing.
    """
    spec = read_spec(folder)
    return Job(
        model=lambda: take_over(folder),
        train=open_stored(folder / TRAIN, spec.train),
        eval=None if spec.eval is None else open_stored(folder / EVAL, spec.eval),
        class_weight=spec.class_weight,
        batch_size=spec.batch_size,
        epochs=spec.epochs,
        **{"seed": spec.seed, **spec.fields},
    )
