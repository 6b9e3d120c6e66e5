"""The names that users import: ``from pserver import Job, Npz``.

Each name is looked up on first use, so ``import pserver`` loads no TensorFlow. A module of the
user's that is called ``worker`` or ``coordinator`` does not stand in for ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.launchers import launch
    from coordinator.search import space
    from coordinator.studies.study import tune
    from pserver.client.lookup import RowReader
    from psrpc.security.credentials import Security
    from psrpc.security.identity import Role
    from worker.data.arrays import Arrays, Npz
    from worker.data.csv import Csv
    from worker.data.function import Function
    from worker.data.parquet import Parquet
    from worker.data.ragged import Ragged
    from worker.data.source import Batch, DataSource
    from worker.data.tfrecord import TfRecords
    from worker.embedding.embedding import Embedding, string_ids
    from worker.embedding.table_options import RowwiseAdagrad
    from worker.fit.cluster import Cluster
    from worker.job.job import Job
    from worker.job.loader import setting
    from worker.predict.frames import predictions

__all__ = [
    "Arrays",
    "Batch",
    "Cluster",
    "Csv",
    "DataSource",
    "Embedding",
    "Function",
    "Job",
    "Npz",
    "Parquet",
    "Ragged",
    "Role",
    "RowReader",
    "RowwiseAdagrad",
    "Security",
    "TfRecords",
    "launch",
    "predictions",
    "setting",
    "space",
    "string_ids",
    "tune",
]

_HOMES = {
    "Arrays": "worker.data.arrays",
    "Batch": "worker.data.source",
    "Cluster": "worker.fit.cluster",
    "Csv": "worker.data.csv",
    "DataSource": "worker.data.source",
    "Embedding": "worker.embedding.embedding",
    "Function": "worker.data.function",
    "Job": "worker.job.job",
    "Npz": "worker.data.arrays",
    "Parquet": "worker.data.parquet",
    "Ragged": "worker.data.ragged",
    "Role": "psrpc.security.identity",
    "RowReader": "pserver.client.lookup",
    "Security": "psrpc.security.credentials",
    "RowwiseAdagrad": "worker.embedding.table_options",
    "TfRecords": "worker.data.tfrecord",
    "launch": "coordinator.launchers",
    "predictions": "worker.predict.frames",
    "setting": "worker.job.loader",
    "space": "coordinator.search",
    "string_ids": "worker.embedding.embedding",
    "tune": "coordinator.studies.study",
}

_PACKAGES = Path(__file__).resolve().parents[1]
"""The directory that holds this package and its siblings."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for sibling in ("psrpc", "coordinator", "worker"):
        _load(sibling)
    from psrpc.ops.extras import TF_MODULES, missing

    try:
        home = import_module(_HOMES[name])
        value = getattr(home, name, None) or import_module(f"{_HOMES[name]}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in TF_MODULES:
            raise
        raise ImportError(missing(f"pserver.{name}", error.name, "tf").coded) from None
    globals()[name] = value
    return value


def _load(package: str) -> None:
    """Imports a sibling of this package from beside it, whatever else ``sys.path`` has.

    Raises:
        ImportError: another module of that name is imported already.
    """
    there = sys.modules.get(package)
    if there is None:
        spec = PathFinder.find_spec(package, [str(_PACKAGES)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    elif Path(str(there.__file__)).resolve().parents[1] != _PACKAGES:
        raise ImportError(
            f"{there.__file__} is called {package!r} like a package of tf-pserver, and was"
            " imported first; rename it"
        )
