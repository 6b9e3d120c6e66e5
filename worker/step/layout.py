"""Lays a gradient out in buffers, and cuts and compresses the shards' parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from psrpc.core.encoding import Encoded, Encoding, Gradient, decode, encode_int8, encode_topk
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ArenaPlan, Plan
from worker.data.source import Array
from worker.job.job import Compression

ALONE_NBYTES = 1 << 20
"""A variable of at least this size has its own buffer, since joining costs another pass over it.
Adjacent smaller ones are joined, since each buffer costs Python work."""

MOST_JOINED = 512
"""Most variables that one operation joins. While compiling, TensorFlow infers the shape anew for
each input from all of them: one operation of 5000 takes 50 s, ten of 500 take 5."""


@dataclass(frozen=True)
class ArenaSpan:
    """Elements ``[start, stop)`` of an arena: adjacent variables that share a buffer, encoded as
    ``encoding``. ``variables`` are indices into the plan's."""

    arena: ArenaPlan
    variables: tuple[int, ...]
    start: int
    stop: int
    encoding: Encoding


class Layout:
    """The buffers of a gradient, ``spans``, in the order of the plan. Immutable."""

    def __init__(
        self,
        plan: Plan,
        wire: Encoding,
        alone_nbytes: int = ALONE_NBYTES,
        most_joined: int = MOST_JOINED,
    ) -> None:
        """``wire`` is the elementwise encoding of encodable arenas."""
        self.spans = tuple(
            span
            for arena in plan.arenas
            for span in _spans(plan, arena, wire, alone_nbytes, most_joined)
        )
        self._cuts = [
            [
                (arena.name, wire if arena.encodable else "plain", self._pieces(arena, shard))
                for arena in plan.arenas
            ]
            for shard in range(plan.shards)
        ]

    def cut(self, buffers: Sequence[Array]) -> tuple[Gradient, ...]:
        """Returns each shard's views of ``buffers``, one flat array per span."""
        return tuple(
            {
                name: Encoded(
                    encoding,
                    tuple([buffers[i] if part is None else buffers[i][part] for i, part in pieces]),
                )
                for name, encoding, pieces in arenas
            }
            for arenas in self._cuts
        )

    def _pieces(self, arena: ArenaPlan, shard: int) -> list[tuple[int, slice | None]]:
        """Returns indices of spans with the shard's slice of each; None is all of it."""
        low, high = arena.cuts[shard], arena.cuts[shard + 1]
        pieces: list[tuple[int, slice | None]] = []
        for index, span in enumerate(self.spans):
            start, stop = max(low, span.start), min(high, span.stop)
            if span.arena is arena and start < stop:
                whole = (start, stop) == (span.start, span.stop)
                part = None if whole else slice(start - span.start, stop - span.start)
                pieces.append((index, part))
        return pieces


def _spans(
    plan: Plan, arena: ArenaPlan, wire: Encoding, alone_nbytes: int, most_joined: int
) -> Iterator[ArenaSpan]:
    encoding: Encoding = wire if arena.encodable else "plain"
    joined: list[int] = []
    start = at = 0
    for index in arena.order:
        size = plan.variables[index].size
        alone = size * arena.itemsize >= alone_nbytes
        if alone and joined:
            yield ArenaSpan(arena, tuple(joined), start, at, encoding)
            joined, start = [], at
        joined.append(index)
        at += size
        if alone or len(joined) == most_joined:
            yield ArenaSpan(arena, tuple(joined), start, at, encoding)
            joined, start = [], at
    if joined:
        yield ArenaSpan(arena, tuple(joined), start, at, encoding)


class Compressor:
    """Compresses the gradients of encodable arenas, each shard's part separately, with error
    feedback. Not thread-safe.

    The residual, which a compressed gradient leaves out, is added to the next one (Seide et al.
    2014, 1-bit SGD, section 3; Stich et al. 2018, Sparsified SGD with Memory, algorithm 1;
    Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 2), so compression loses
    nothing, but delays parts of a gradient. It takes twice the memory of those arenas, plus that of
    the largest part.

    Runs in NumPy on the host, where it is cheap: finding the largest 1 % of 230 000 elements takes
    0.4 ms, and 2 ms by ``tf.math.top_k``.
    """

    def __init__(self, plan: Plan, compression: Compression, topk: float) -> None:
        """``topk`` is the fraction of elements kept by the encoding ``topk``."""
        self._encoding: Encoding = compression
        self._topk = topk
        self._arenas = [arena for arena in plan.arenas if arena.encodable]
        self._residual = {a.name: np.zeros(a.length, np.float32) for a in self._arenas}
        # The residual before the last gradient; the next compression overwrites it.
        self._former = {a.name: np.zeros(a.length, np.float32) for a in self._arenas}
        self._open = False
        parts = [a.shard_length(k) for a in self._arenas for k in range(plan.shards)]
        self._decoded = np.empty(max(parts, default=0), np.float32)

    def compress(self, gradients: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
        """Compresses finite, plain ``gradients``, one per shard. :meth:`settle` must follow before
        the next call.

        Returns an empty tuple, and keeps the residual, if the sum with the residual is not finite.
        """
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                compressed = tuple(self._shard(*each) for each in enumerate(gradients))
        except InvalidArgument:
            return ()
        self._residual, self._former = self._former, self._residual
        self._open = True
        return compressed

    def settle(self, unused: Iterable[int] = ()) -> None:
        """Records that the shards ``unused`` never use the last gradient, and that the others do.
        Only the first call per gradient has an effect."""
        if not self._open:
            return
        self._open = False
        for shard in unused:
            for arena in self._arenas:
                part = _part(arena, shard)
                np.copyto(self._residual[arena.name][part], self._former[arena.name][part])

    def forget(self) -> None:
        """Drops the residual."""
        self._open = False
        for residual in self._residual.values():
            residual.fill(0)

    def _shard(self, shard: int, gradient: Gradient) -> Gradient:
        compressed = dict(gradient)
        for arena in self._arenas:
            part = _part(arena, shard)
            if part.stop - part.start > 1:
                corrected = self._former[arena.name][part]
                _add(self._residual[arena.name][part], gradient[arena.name].parts, corrected)
                compressed[arena.name] = self._encoded(corrected)
        return compressed

    def _encoded(self, corrected: Array) -> Encoded:
        """Encodes ``corrected`` and leaves there what the encoding omits. Raises InvalidArgument if
        it is not finite."""
        if self._encoding == "int8":
            raw = encode_int8(corrected)
        else:
            kept = max(1, round(self._topk * len(corrected)))
            raw = encode_topk(corrected, min(kept, len(corrected) // 2))
        decoded = self._decoded[: len(corrected)]
        decode(self._encoding, raw, decoded)
        corrected -= decoded
        return Encoded(self._encoding, (raw,))


def _part(arena: ArenaPlan, shard: int) -> slice:
    return slice(arena.cuts[shard], arena.cuts[shard + 1])


def _add(residual: Array, parts: tuple[Array, ...], into: Array) -> None:
    at = 0
    for part in parts:
        end = at + len(part)
        np.add(residual[at:end], part, out=into[at:end])
        at = end
