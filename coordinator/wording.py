"""Figures and names as a person reads them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def duration(seconds: float) -> str:
    """``"4.2 s"``, ``"1:05"`` or ``"2:01:05"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def metrics(results: Mapping[str, float]) -> str:
    """``"loss 0.1234, accuracy 0.9700"``: the loss first, the others by name."""
    names = sorted(results, key=lambda name: (name != "loss", name))
    return ", ".join(f"{name} {results[name]:.4f}" for name in names)


def shards(indices: Iterable[int]) -> str:
    """``"shard 1"`` or ``"shards 0, 2"``; at least one."""
    names = [str(index) for index in indices]
    return f"shard{'s' if len(names) > 1 else ''} {', '.join(names)}"


def of(have: int, of_all: int, noun: str) -> str:
    """``"0 of 1 task"`` or ``"1 of 2 tasks"``."""
    return f"{have} of {of_all} {noun}{'' if of_all == 1 else 's'}"
