"""The worker, and what a job file imports: ``from worker import Job, Npz``.

Names are resolved on first use, so that ``worker --help`` does not pay for what it does not need.
Nothing here imports TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.data.arrays import Arrays, Npz
    from worker.data.csv import Csv
    from worker.data.function import Function
    from worker.data.ragged import Ragged
    from worker.data.source import Batch, DataSource
    from worker.data.tfrecord import TfRecords
    from worker.embedding.embedding import Embedding, string_ids
    from worker.embedding.rowwise_adagrad import RowwiseAdagrad
    from worker.job.job import Job
    from worker.job.settings import setting

__all__ = [
    "Arrays",
    "Batch",
    "Csv",
    "DataSource",
    "Embedding",
    "Function",
    "Job",
    "Npz",
    "Ragged",
    "RowwiseAdagrad",
    "TfRecords",
    "setting",
    "string_ids",
]

_HOMES = {
    "Arrays": "worker.data.arrays",
    "Batch": "worker.data.source",
    "Csv": "worker.data.csv",
    "DataSource": "worker.data.source",
    "Embedding": "worker.embedding.embedding",
    "Function": "worker.data.function",
    "Job": "worker.job.job",
    "Npz": "worker.data.arrays",
    "Ragged": "worker.data.ragged",
    "RowwiseAdagrad": "worker.embedding.rowwise_adagrad",
    "TfRecords": "worker.data.tfrecord",
    "setting": "worker.job.settings",
    "string_ids": "worker.embedding.embedding",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'worker' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
