"""An optimizer that embedding tables have and Keras has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator for each row, to which the mean of its squared gradients is
    added: as in DLRM (Naumov et al. 2019) and FBGEMM. For ``worker.Embedding(optimizer=...)``.

    Of a row w with gradient g, and with s for the accumulator::

        s ← s + mean(g²);   w ← w − learning_rate · g / (√s + epsilon)

    The defaults are FBGEMM's, but for ``learning_rate``, which is Keras's.
    """

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def serialized(self) -> dict[str, Any]:
        """As ``keras.optimizers.serialize`` writes its own."""
        return {"class_name": "RowwiseAdagrad", "config": dict(vars(self))}
