"""Corrects a gradient for the updates since its parameters were pulled (Zheng et al. 2017,
"Asynchronous Stochastic Gradient Descent with Delay Compensation", DC-ASGD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.core.requests import Values
from pserver.updates.lending import Lending
from psrpc.core.plan import MEAN_SQUARE, Plan, aligned_empty
from psrpc.core.policy import Policy

NDArray = npt.NDArray[Any]

EPSILON = 1e-7
"""ε of the formula, with the paper's value: keeps λ_t finite for elements whose gradients were all
0."""

_BLOCK = 32 * 1024
"""Elements processed at a time, see ``numpy_engine``."""


class Compensation:
    """Computes g + λ g ⊙ g ⊙ (w − w_bak) for the elements of trainable arenas. w_bak are the
    parameters that g was computed from, and λ g ⊙ g approximates the Hessian (sections 3 and 4).

    DC-ASGD-c has one λ. DC-ASGD-a has λ_t = λ / sqrt(MeanSquare(t) + ε) for each element, where
    MeanSquare(t) = m · MeanSquare(t − 1) + (1 − m) g ⊙ g (section 6), starting at 0.

    Computes in the arena's dtype, even if the gradient has another dtype. Not thread-safe."""

    def __init__(self, plan: Plan, shard: int, policy: Policy) -> None:
        """``policy`` must have ``delay_compensation`` set."""
        self._arenas = {
            a.name: np.dtype(a.dtype)
            for a in plan.arenas
            if a.role == "trainable" and a.shard_length(shard)
        }
        lengths = {a.name: a.shard_length(shard) for a in plan.arenas}
        self._policy = policy
        self._lending = Lending()
        # Gradients may lie in a worker's memory, where only the worker may write.
        self._corrected = {n: aligned_empty(lengths[n], d.name) for n, d in self._arenas.items()}
        self._mean_square: dict[str, NDArray] = {}
        if policy.delay_compensation == "adaptive":
            self._mean_square = {
                n: aligned_empty(lengths[n], d.name) for n, d in self._arenas.items()
            }
            for array in self._mean_square.values():
                array.fill(0)
        self._scratch = {d: [np.empty(_BLOCK, d) for _ in range(3)] for d in self._arenas.values()}

    def follow(self, policy: Policy) -> bool:
        """Continues under ``policy`` and returns True; returns False and changes nothing if
        ``policy`` needs another kind of compensation."""
        if policy.delay_compensation != self._policy.delay_compensation:
            return False
        self._policy = policy
        return True

    def correct(
        self, gradients: Mapping[str, NDArray], now: Values | None, pulled: Values | None
    ) -> Mapping[str, NDArray]:
        """Returns ``gradients`` with those of trainable arenas corrected.

        ``pulled`` is None if no update came in between, or if the parameters of the gradient are
        unknown. The gradients then stay as they are and only update the mean square.

        Args:
            now: plain values of the present version; not needed without ``pulled``.
            pulled: plain values of the version that the gradient was computed from.

        Returns:
            Arena name -> ``[shard length]``, in arrays that are valid until the next call.
        """
        if not gradients or (pulled is None and not self._mean_square):
            return gradients
        corrected = dict(gradients)
        # No warnings: a diverging run overflows here, and its loss already shows that.
        with np.errstate(all="ignore"):
            for name in self._arenas:
                between = None
                if now is not None and pulled is not None:
                    between = now.arrays[name], pulled.arrays[name]
                    corrected[name] = self._corrected[name]
                self._correct(name, gradients[name], between)
        return corrected

    def _correct(
        self, name: str, gradients: NDArray, between: tuple[NDArray, NDArray] | None
    ) -> None:
        dtype = self._arenas[name]
        real = dtype.type
        strength = real(self._policy.compensation)
        decay, rest = real(self._policy.dc_decay), real(1 - self._policy.dc_decay)
        old = self._mean_square.get(name)
        new = None if old is None else self._lending.own(old)
        for start in range(0, len(gradients), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(gradients)))
            widened, square, scratch = (s[: block.stop - start] for s in self._scratch[dtype])
            gradient = gradients[block]
            if gradient.dtype != dtype:
                np.copyto(widened, gradient)
                gradient = widened
            np.multiply(gradient, gradient, out=square)
            if old is not None and new is not None:
                np.multiply(square, rest, out=scratch)
                np.multiply(old[block], decay, out=new[block])
                new[block] += scratch
            if between is None:
                continue
            now, pulled = between
            corrected = self._corrected[name][block]
            np.subtract(now[block], pulled[block], out=corrected)
            corrected *= square
            corrected *= strength
            if new is not None:
                np.add(new[block], real(EPSILON), out=scratch)
                np.sqrt(scratch, out=scratch)
                corrected /= scratch
            corrected += gradient
        if new is not None:
            self._mean_square[name] = new

    def slots(self) -> dict[str, dict[str, NDArray]]:
        """Returns the state for a checkpoint: slot name -> trainable arena name -> ``[shard
        length]``, views that later gradients do not change."""
        if not self._mean_square:
            return {}
        return {MEAN_SQUARE: {n: self._lending.lend(a) for n, a in self._mean_square.items()}}

    def load_slots(self, elements: Mapping[str, Mapping[str, NDArray]]) -> None:
        """Copies the state from a checkpoint; starts at 0 for arenas that it lacks."""
        saved = elements.get(MEAN_SQUARE, {})
        for name, array in self._mean_square.items():
            self._mean_square[name] = own = self._lending.own(array)
            if name in saved:
                np.copyto(own, saved[name])
            else:
                own.fill(0)
