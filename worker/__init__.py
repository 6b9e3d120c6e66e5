"""The worker. A job file may import from here what :mod:`pserver` names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pserver import (
        Arrays,
        Batch,
        Csv,
        DataSource,
        Embedding,
        Function,
        Job,
        Npz,
        Parquet,
        Ragged,
        RowwiseAdagrad,
        TfRecords,
        setting,
        string_ids,
    )

__all__ = [
    "Arrays",
    "Batch",
    "Csv",
    "DataSource",
    "Embedding",
    "Function",
    "Job",
    "Npz",
    "Parquet",
    "Ragged",
    "RowwiseAdagrad",
    "TfRecords",
    "setting",
    "string_ids",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pserver"), name)
