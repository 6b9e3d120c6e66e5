"""Weights of classes, multiplied into the sample weights of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidData
from worker.data.ragged import in_numpy
from worker.data.source import Array, Batch, map_arrays


def weighed(batch: Batch, class_weight: Mapping[int, float] | None) -> Batch:
    """Adds sample weights to a batch ``(x, y)``, in NumPy: the weight of each class, 1 by default.

    The class is the label ``[n]`` or ``[n, 1]``, rounded, or the argmax of ``[n, classes]``.
    Without ``class_weight`` the batch stays as it is.

    Raises:
        InvalidData: the batch has weights already, or labels without one class per record.
    """
    if class_weight is None:
        return batch
    if len(batch) > 2:
        raise InvalidData(
            "class_weight is given, but the records have weights of their own; leave one out, or "
            "multiply them (map)"
        )
    classes = _classes(batch[1])
    weights = np.ones(len(classes), np.float32)
    for each, weight in class_weight.items():
        weights[classes == each] = weight
    return (*batch, weights)


def _classes(labels: Any) -> Array:
    """Returns the classes ``[n]``, int64."""
    labels = map_arrays(in_numpy, labels)
    if not isinstance(labels, np.ndarray):
        kind = "several outputs" if isinstance(labels, dict | list | tuple) else "ragged labels"
        raise InvalidData(
            f"class_weight is given, but the model has {kind}; it needs one class for each record: "
            "give sample weights"
        )
    if labels.dtype.kind not in "biuf" or labels.ndim > 2:
        raise InvalidData(
            f"class_weight is given, but labels are {labels.dtype} of shape {list(labels.shape)}; "
            "it needs one class for each record: give sample weights"
        )
    if labels.ndim == 2:
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
    classes: Array = np.round(labels.astype(np.float64)).astype(np.int64)
    return classes
