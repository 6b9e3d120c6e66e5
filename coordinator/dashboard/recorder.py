"""Records the dashboard's history of a run: curves and events. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from coordinator.core.wording import duration
from coordinator.dashboard.series import Point, Points
from coordinator.display.timeline import KINDS, Event, events_between
from psrpc.core.document import Check, anything, choice, listed, maybe, real, record, text, whole
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

FORMAT = 1
"""Version of the JSON. Load-bearing."""

EVENTS = 400
"""Number of newest events kept. At most half of them are routine ones of every epoch, so that these
do not push out failures."""

_ROUTINE = ("evaluation", "checkpoint")

LONGEST_TEXT = 500
"""Maximum of characters of an event's text."""

_ONCE = ("evaluation", "checkpoint", "mode", "warning")
"""Kinds of events that a restarted coordinator would report again."""

_TRAINS = ("training", "finishing", "stopping")
"""Phases in which rates are meaningful."""


class Recorder:
    """Reads a job's status about once a second. Times are Unix seconds. Not thread-safe."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.points = Points()
        self._routine: deque[dict[str, Any]] = deque(maxlen=EVENTS // 2)
        self._others: deque[dict[str, Any]] = deque(maxlen=EVENTS // 2)
        self._last = GetJobStatusResponse()
        self._looked: float | None = None
        self._number = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        return sorted([*self._routine, *self._others], key=itemgetter("number"))

    def look(self, status: GetJobStatusResponse, now: float) -> None:
        """Records the state of the job at ``now``."""
        last, self._last = self._last, GetJobStatusResponse()
        self._last.CopyFrom(status)
        self._looked = now
        for event in events_between(last, status):
            self._note(event, now, status.global_step)
        if status.reason and status.reason != last.reason:
            done = status.phase == "done"
            event = (
                Event("phase", status.reason)
                if done
                else Event("failure", f"failed: {status.reason}")
            )
            self._note(event, now, status.global_step)
        if status.phase in _TRAINS:
            self.points.add(_point(last, status, now))

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; the inverse of :meth:`resume`."""
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "looked": self._looked,
            "points": self.points.to_json(),
            "events": self.events,
        }

    def resume(self, document: Any, now: float) -> bool:
        """Continues the history of an earlier coordinator of the same run. Returns False, without
        a change, if the document is not such a history."""
        try:
            if _KEPT(document, "")["run_id"] != self.run_id:
                return False
            looked = document["looked"]
            points = Points.from_json(document["points"])
            events = [_read_event(event) for event in document["events"][-EVENTS:]]
        except ValueError:
            return False
        self.points = points
        for event in events:
            self._keep(event)
        self._number = max((event["number"] for event in events), default=0)
        step = points.recent[-1].step if points.recent else 0
        away = ""
        if looked is not None and 0 <= looked <= now:
            away = f", {duration(now - looked)} after it was last seen"
            # A gap, since nothing is known of the time between.
            self.points.add(Point(now, step))
        self._note(Event("restart", f"coordinator started again{away}"), now, step)
        return True

    def _note(self, event: Event, now: float, step: int) -> None:
        text = event.text[:LONGEST_TEXT]
        if event.kind in _ONCE and any(known["text"] == text for known in self.events):
            return
        self._number += 1
        self._keep(
            {"number": self._number, "at": now, "step": step, "kind": event.kind, "text": text}
        )

    def _keep(self, event: dict[str, Any]) -> None:
        (self._routine if event["kind"] in _ROUTINE else self._others).append(event)


def _point(last: GetJobStatusResponse, status: GetJobStatusResponse, now: float) -> Point:
    active = sum(worker.state == "active" for worker in status.workers)
    return Point(
        at=now,
        step=status.global_step,
        loss=status.loss if math.isfinite(status.loss) else None,
        examples_per_s=status.examples_per_s,
        steps_per_s=status.steps_per_s,
        staleness=_mean_staleness(last.staleness_counts, status.staleness_counts),
        workers=active,
    )


def _mean_staleness(before: Sequence[int], now: Sequence[int]) -> float | None:
    """Returns the mean of the new pushes; None without any, or if a shard was restarted."""
    new = [count - (before[s] if s < len(before) else 0) for s, count in enumerate(now)]
    if not any(new) or min(new) < 0:
        return None
    return sum(s * count for s, count in enumerate(new)) / sum(new)


def _read_event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in _FIELDS} | {"text": event["text"][:LONGEST_TEXT]}


_FIELDS: Mapping[str, Check] = {
    "number": whole(),
    "at": real,
    "step": whole(),
    "kind": choice(*KINDS),
    "text": text,
}
_KEPT = record(
    {
        "format": whole(FORMAT, FORMAT),
        "run_id": text,
        "looked": maybe(real),
        "points": anything,
        "events": listed(record(_FIELDS, more=True)),
    },
    more=True,
)
