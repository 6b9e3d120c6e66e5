"""The settings of a ``fit`` in the file ``spec.json`` of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidJob

SPEC = "spec.json"
TRAIN, EVAL = "train", "eval"
"""Directories of the data, beside it."""

FORMAT = 1
"""Version of the file. Load-bearing: a job of another version refuses it."""


@dataclass(frozen=True, kw_only=True)
class FitSpec:
    """Settings of a ``fit``, the same for the caller that writes them and the job that reads them.

    Attributes:
        train: description of the training data, for ``worker.stored.stored_data.open_stored``.
        eval: description of the validation data, or None.
        batch_size: records of a micro-batch.
        epochs: passes over the training data.
        seed: seed of the order of records and of dropout masks.
        class_weight: factors of the loss by class, as in ``Job``.
        fields: further fields of the job by name, of plain values, such as ``intra_op_threads``.
            Those of a policy may as well be options of ``coordinator up``.
    """

    train: Mapping[str, Any]
    eval: Mapping[str, Any] | None = None
    batch_size: int
    epochs: int = 1
    seed: int = 0
    class_weight: Mapping[int, float] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def write_spec(folder: Path, spec: FitSpec) -> None:
    """Writes ``spec.json``; replaces one that is there."""
    document = {"format": FORMAT, **asdict(spec)}
    if spec.class_weight is not None:
        # JSON has no integers as keys.
        document["class_weight"] = [[int(k), float(v)] for k, v in spec.class_weight.items()]
    (folder / SPEC).write_text(json.dumps(document, indent=1))


def read_spec(folder: Path) -> FitSpec:
    """Reads ``spec.json``.

    Raises:
        InvalidJob: there is none, or another version wrote it.
    """
    path = folder / SPEC
    try:
        document = json.loads(path.read_text())
        version = document.pop("format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidJob(
            f"{str(path)!r} is not the settings of a fit ({error}); pserver.Cluster writes the "
            "folder of a fit"
        ) from None
    if version != FORMAT:
        raise InvalidJob(f"{str(path)!r} has format {version!r}; this version reads {FORMAT}")
    weights = document["class_weight"]
    if weights is not None:
        document["class_weight"] = dict(weights)
    return FitSpec(**document)
