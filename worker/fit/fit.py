"""The job of a ``fit``: its model, data and settings are in the folder of ``--set fit=DIR``.

The caller of ``fit`` writes the folder: ``worker.fit.handover.hand_over`` the model,
``worker.fit.spec.write_spec`` the settings.
"""

from pathlib import Path

from worker.fit.handover import take_over
from worker.fit.spec import EVAL, TRAIN, read_spec
from worker.job.job import Job
from worker.job.loader import setting
from worker.stored.stored_data import open_stored

FOLDER = Path(setting("fit", "."))
SPEC = read_spec(FOLDER)

job = Job(
    model=lambda: take_over(FOLDER),
    train=open_stored(FOLDER / TRAIN, SPEC.train),
    eval=None if SPEC.eval is None else open_stored(FOLDER / EVAL, SPEC.eval),
    class_weight=SPEC.class_weight,
    batch_size=SPEC.batch_size,
    epochs=SPEC.epochs,
    **{"seed": SPEC.seed, **SPEC.fields},
)
