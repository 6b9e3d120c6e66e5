"""Records of Criteo's display advertising data: 13 counts and 26 categories of each impression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUMERIC, CATEGORICAL = 13, 26

MISSING = -1
"""The category of a field that is empty."""

FIELD_BITS = 40
"""Values have 32 bits, and one more says that there is none."""

Features = dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Records:
    """Content of ``n`` lines of a file.

    Attributes:
        labels: ``[n]``, 1 for a click, 0 for none.
        numeric: ``[n, 13]`` whole numbers, NaN where the field is empty.
        categorical: ``[n, 26]``, the hexadecimal values as numbers of 32 bits, or MISSING.
    """

    labels: npt.NDArray[np.int8]
    numeric: npt.NDArray[np.float32]
    categorical: npt.NDArray[np.int64]

    def batch(self) -> tuple[Features, npt.NDArray[np.float32]]:
        """``(x, y)`` as the model takes them, ``y`` being ``[n, 1]``.

        ``x["numeric"]``, float32 ``[n, 13]``, is ``sign(v) log(1 + |v|)``, and 0 where the field is
        empty. ``x["categorical"]``, int64 ``[n, 26]``, holds ids that differ where the field
        differs, so that all fields can share one table.
        """
        known = np.nan_to_num(self.numeric, nan=0.0)
        logarithms = np.sign(known) * np.log1p(np.abs(known))
        fields = np.arange(CATEGORICAL, dtype=np.int64) << FIELD_BITS
        values = np.where(self.categorical == MISSING, 1 << 32, self.categorical)
        x: Features = {"numeric": logarithms, "categorical": fields + values}
        return x, self.labels.astype(np.float32)[:, np.newaxis]
