"""An optimizer that embedding tables have and Keras has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import InvalidJob


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator for each row, to which the mean of its squared gradients is
    added: as in DLRM (Naumov et al. 2019) and FBGEMM. For ``worker.Embedding(optimizer=...)``.

    Of a row w with gradient g, and with s for the accumulator::

        s ← s + mean(g²);   w ← w − learning_rate · g / (√s + epsilon)

    The defaults are FBGEMM's, but for ``learning_rate``, which is Keras's. It is a number, or a
    schedule of ``keras.optimizers.schedules``.
    """

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def serialized(self) -> dict[str, Any]:
        """As ``keras.optimizers.serialize`` writes its own.

        Raises:
            InvalidJob: the learning rate is neither a number nor a schedule.
        """
        config = dict(vars(self))
        if not isinstance(self.learning_rate, int | float):
            from keras.optimizers import schedules

            if not isinstance(self.learning_rate, schedules.LearningRateSchedule):
                raise InvalidJob(
                    f"RowwiseAdagrad has learning_rate {self.learning_rate!r}; expected a number "
                    "or a schedule of keras.optimizers.schedules"
                )
            config["learning_rate"] = schedules.serialize(self.learning_rate)
        return {"class_name": "RowwiseAdagrad", "config": config}
