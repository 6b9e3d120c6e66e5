"""The parts of an ``evaluate`` or ``predict``: which batches each takes, and the settings of all,
in the file ``parts.json`` of their folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

DATA = "data"
"""Directory of the data, in the same folder."""

TABLES = "tables"
"""Directory of the rows of embedding tables, in the same folder; absent without tables."""

_FILE = "parts.json"

What = Literal["evaluate", "predict"]


def share(batches: int, index: int, count: int) -> range:
    """Returns the batches of part ``index`` of ``count``: in order, each batch in one part, and
    parts whose sizes differ by one at most."""
    return range(index * batches // count, (index + 1) * batches // count)


@dataclass(frozen=True, kw_only=True)
class PartsSpec:
    """Settings of all parts.

    Attributes:
        what: the method of the model.
        data: description of the data, for ``worker.stored.stored_data.open_stored``.
        run_eagerly: the ``run_eagerly`` of the caller's model.
        gpu: ``auto``, ``none`` or an index; with ``auto`` parts take the GPUs in turn.
        gpu_memory_fraction: as for ``worker run``.
        intra_op_threads: threads of one operation in a part; None divides the cores among the
            parts.
    """

    what: What
    data: Mapping[str, Any]
    run_eagerly: bool = False
    gpu: str = "auto"
    gpu_memory_fraction: float | None = None
    intra_op_threads: int | None = None


def write_parts_spec(folder: Path, spec: PartsSpec) -> None:
    """Writes ``parts.json``."""
    (folder / _FILE).write_text(json.dumps(asdict(spec)))


def read_parts_spec(folder: Path) -> PartsSpec:
    """Reads ``parts.json``. Only processes of the caller's version read it."""
    return PartsSpec(**json.loads((folder / _FILE).read_text()))
