"""An optimizer that embedding tables have and Keras has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator for each row, the mean of its squared gradients: as in DLRM
    (Naumov et al. 2019) and FBGEMM. For ``worker.Embedding(optimizer=...)``.

    Of a row of D elements with gradient g: ``a += mean(g * g)``, then
    ``row -= learning_rate * g / sqrt(a + epsilon)``, as in Keras's Adagrad.
    """

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def serialized(self) -> dict[str, Any]:
        """As ``keras.optimizers.serialize`` writes its own."""
        return {"class_name": "RowwiseAdagrad", "config": dict(vars(self))}
