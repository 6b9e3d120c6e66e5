"""An update engine that counts batches whatever they weigh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.updates.numpy_engine import NumpyEngine
from psrpc.plan import Plan
from tests.sim.witness import ARENA

NDArray = npt.NDArray[Any]


class CountingEngine(NumpyEngine):
    """The real one; but whatever is not zero of the witness adds 1 to its entry, whatever its
    weight in its round and the rate that it is applied at. So an entry still shows how many
    updates a record was in."""

    def __init__(self, optimizer: Mapping[str, Any], plan: Plan, shard: int, rows: int) -> None:
        """The witness is the first ``rows`` entries of the shard's part."""
        super().__init__(optimizer, plan, shard)
        self._rows = rows

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        """See :class:`pserver.updates.engine.UpdateEngine`."""
        if gradients:
            witness = gradients[ARENA][: self._rows]
            np.copyto(witness, np.float32(-1.0 / rate_scale), where=witness != 0)
        super().apply(gradients, rate_scale)
