"""What a shard multiplies the learning rate of its optimizer by, whatever schedule that has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Pure.

    Attributes:
        scale: k, reached by a gradual warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            section 2.2).
        warmup_updates: T, how many updates it takes; 0 scales from the first.
        inverse: divide by 1 + staleness as well (Zhang et al. 2016, "Staleness-aware Async-SGD",
            section 3.2, there with the staleness itself, which is never 0).
    """

    scale: float = 1.0
    warmup_updates: int = 0
    inverse: bool = False

    def factor(self, iterations: int, staleness: int = 0) -> float:
        """(1 + (k - 1) · min(1, i / T)) / (1 + τ); exactly 1.0 where nothing is asked for.

        Args:
            iterations: i, the updates that the optimizer has done before.
            staleness: τ, the updates since the parameters that the gradient is of.
        """
        factor = self.scale
        if iterations < self.warmup_updates:
            factor = 1.0 + (self.scale - 1.0) * (iterations / self.warmup_updates)
        if self.inverse:
            factor /= 1 + staleness
        return factor
