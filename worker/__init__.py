"""The worker, and what a job file imports: ``from worker import Job, Npz``.

Names are resolved on first use, so that ``worker --help`` does not pay for what it does not need.
Nothing here imports TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.data import Batch, DataSource
    from worker.data_arrays import Arrays, Npz
    from worker.data_csv import Csv
    from worker.data_function import Function
    from worker.data_tfrecord import TfRecords
    from worker.embedding import Embedding, string_ids
    from worker.job import Job
    from worker.ragged import Ragged
    from worker.rowwise_adagrad import RowwiseAdagrad
    from worker.settings import setting

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
    "Arrays": "worker.data_arrays",
    "Batch": "worker.data",
    "Csv": "worker.data_csv",
    "DataSource": "worker.data",
    "Embedding": "worker.embedding",
    "Function": "worker.data_function",
    "Job": "worker.job",
    "Npz": "worker.data_arrays",
    "Ragged": "worker.ragged",
    "RowwiseAdagrad": "worker.rowwise_adagrad",
    "TfRecords": "worker.data_tfrecord",
    "setting": "worker.settings",
    "string_ids": "worker.embedding",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'worker' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
