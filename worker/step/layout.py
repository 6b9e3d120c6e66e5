"""In which buffers a gradient leaves the compiled step, and which of them go to which shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psrpc.core.encoding import Encoded, Encoding, Gradient
from psrpc.core.plan import ArenaPlan, Plan
from worker.data.source import Array

ALONE_NBYTES = 1 << 20
"""A variable of so many bytes has a buffer of its own: joining would cost another pass over it.
Smaller ones that follow one another are joined, since each buffer costs Python work."""

MOST_JOINED = 512
"""Variables that one operation joins. TensorFlow, compiling, infers the operation's shape anew for
each of its inputs, and looks at all of them: one of 5000 takes 50 s, ten of 500 take 5."""


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of an arena: variables in a row that share a buffer.

    ``variables`` are indices into the plan's; the buffer's elements are encoded as ``encoding``.
    """

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
        """``wire`` is the encoding of arenas that can be encoded: one element by element."""
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
        """What each shard gets of ``buffers``, a flat array for each span: views of them."""
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
        """Indices of spans, and which of their elements are the shard's; None is all of them."""
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
) -> Iterator[Span]:
    encoding: Encoding = wire if arena.encodable else "plain"
    joined: list[int] = []
    start = at = 0
    for index in arena.order:
        size = plan.variables[index].size
        alone = size * arena.itemsize >= alone_nbytes
        if alone and joined:
            yield Span(arena, tuple(joined), start, at, encoding)
            joined, start = [], at
        joined.append(index)
        at += size
        if alone or len(joined) == most_joined:
            yield Span(arena, tuple(joined), start, at, encoding)
            joined, start = [], at
    if joined:
        yield Span(arena, tuple(joined), start, at, encoding)
