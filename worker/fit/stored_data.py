"""Arrays of a ``fit`` as files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from worker.data.arrays import Arrays
from worker.data.source import DataSource


def store_arrays(folder: Path, name: str, x: Any, y: Any, sample_weight: Any = None) -> Any:
    """Writes arrays, or dicts and lists of them; returns their description for
    :func:`open_stored`."""
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    return {key: _stored(folder, f"{name}-{key}", value) for key, value in parts.items()}


def open_stored(folder: Path, description: Mapping[str, Any]) -> DataSource:
    """Returns the data source of a description of :func:`store_arrays`."""
    return Arrays(**{key: _opened(folder, value) for key, value in description.items()})


def _stored(folder: Path, name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _stored(folder, f"{name}-{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(folder, f"{name}-{place}", each) for place, each in enumerate(value)]
    np.save(folder / f"{name}.npy", np.asarray(value), allow_pickle=False)
    return f"{name}.npy"


def _opened(folder: Path, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _opened(folder, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_opened(folder, each) for each in value]
    return np.load(folder / value, mmap_mode="r", allow_pickle=False)
