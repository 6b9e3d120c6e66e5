"""The dashboard's history of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.dashboard.recorder import EVENTS, LONGEST_TEXT, Recorder
from psrpc.v1 import coordinator_pb2 as pb

NOW = 1_800_000_000.0


def status(**fields: Any) -> pb.GetJobStatusResponse:
    plain = {"job": "digits", "phase": "training", "loss": 0.5, "generation": 1, "policy": 1}
    return pb.GetJobStatusResponse(**{**plain, **fields})


def shard(state: str, incarnation: int = 7) -> pb.ShardStatus:
    return pb.ShardStatus(shard=0, state=state, incarnation=incarnation)


def told(recorder: Recorder) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in recorder.events]


def seen(*statuses: pb.GetJobStatusResponse) -> list[tuple[str, str]]:
    """Events recorded from all statuses but the first."""
    recorder = Recorder("r")
    recorder.look(statuses[0], NOW)
    first = len(recorder.events)
    for second, one in enumerate(statuses[1:], 1):
        recorder.look(one, NOW + second)
    return told(recorder)[first:]


def test_a_job_that_goes_well() -> None:
    assert seen(
        status(phase="waiting"),
        status(newest_checkpoint="checkpoints/step-00000000"),
        status(newest_checkpoint="checkpoints/step-00000500"),
        status(newest_checkpoint="checkpoints/step-00000500", phase="done"),
    ) == [
        ("phase", "digits: training"),
        ("checkpoint", "checkpoint checkpoints/step-00000000"),
        ("checkpoint", "checkpoint checkpoints/step-00000500"),
        ("phase", "digits: done"),
    ]


def test_a_shard_that_is_lost_and_replaced() -> None:
    assert seen(
        status(shards=[shard("ready")]),
        status(shards=[shard("silent")]),
        status(shards=[shard("starting", 8)], phase="recovering"),
        status(shards=[shard("ready", 8)], generation=2),
    ) == [
        ("failure", "shard 0 is silent"),
        ("phase", "digits: recovering"),
        ("restart", "shard 0 is starting"),
        ("phase", "digits: training"),
        ("restart", "generation 2"),
        ("member", "shard 0 is ready"),
    ]


def test_a_change_of_mode_and_a_failure() -> None:
    assert seen(
        status(),
        status(switching="to ssp"),
        status(policy=2, settings="ssp staleness=4", warnings=["the disk is full"]),
        status(policy=2, phase="failed", reason="NaN", warnings=["the disk is full"]),
    ) == [
        ("mode", "under way: to ssp"),
        ("mode", "policy 2: ssp staleness=4"),
        ("warning", "warning: the disk is full"),
        ("failure", "digits: failed"),
        ("failure", "failed: NaN"),
    ]


def test_points_are_of_training_alone_and_in_steps() -> None:
    recorder = Recorder("r")
    recorder.look(status(phase="waiting"), NOW)
    recorder.look(status(replicas=4, steps_per_s=2.0, global_step=3, loss=float("nan")), NOW + 1)
    workers = [pb.WorkerStatus(state="active"), pb.WorkerStatus(state="left")]
    recorder.look(status(staleness_counts=[2], workers=workers), NOW + 2)
    recorder.look(status(staleness_counts=[3, 0, 3]), NOW + 3)
    recorder.look(status(staleness_counts=[1]), NOW + 4)
    points = recorder.points.recent
    assert [point.at for point in points] == [NOW + 1, NOW + 2, NOW + 3, NOW + 4]
    assert (points[0].steps_per_s, points[0].loss, points[0].step) == (2.0, None, 3)
    # Of the pushes since; a shard that was restarted counts anew.
    assert [point.staleness for point in points] == [None, 0.0, 1.5, None]
    assert points[1].workers == 1.0


def test_events_are_bounded_and_routine_pushes_out_nothing_else() -> None:
    recorder = Recorder("r")
    for number in range(EVENTS + 5):
        recorder.look(status(waiting_for="x" * 2000 + str(number % 2)), NOW + number)
    assert len(recorder.events) == EVENTS // 2
    assert max(len(event["text"]) for event in recorder.events) == LONGEST_TEXT
    others = recorder.events
    for number in range(EVENTS):
        recorder.look(status(newest_checkpoint=f"c/{number}"), NOW + EVENTS + 5 + number)
    assert len(recorder.events) == EVENTS
    assert {event["kind"] for event in recorder.events[EVENTS // 2 :]} == {"checkpoint"}
    assert recorder.events[: EVENTS // 2] == others


def test_a_coordinator_that_was_started_again_goes_on() -> None:
    first, second = Recorder("r"), Recorder("r")
    found = pb.EvaluationResult(evaluation="epoch-0", global_step=5, results={"loss": 1.0})
    known = status(global_step=9, newest_checkpoint="c/1", evaluations=[found])
    first.look(known, NOW)
    assert second.resume(json.loads(json.dumps(first.to_json())), NOW + 60)
    second.look(known, NOW + 61)
    assert told(second)[: len(first.events)] == told(first)
    # What it has heard before it does not tell again.
    assert told(second)[len(first.events) :] == [
        ("restart", "coordinator started again, 1:00 after it was last seen"),
        ("phase", "digits: training"),
    ]
    points = second.points.recent
    # The curves have a gap where no coordinator recorded.
    assert [(point.at, point.loss) for point in points] == [
        (NOW, 0.5),
        (NOW + 60, None),
        (NOW + 61, 0.5),
    ]
    numbers = [event["number"] for event in second.events]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"run_id": "another"},
        {"points": None},
        {"events": [{"kind": "script", "text": "", "number": 1, "at": 0, "step": 0}]},
        {"events": [{"kind": "phase", "text": 5, "number": 1, "at": 0, "step": 0}]},
        {"events": 5},
    ],
)
def test_files_of_other_runs_are_left_alone(change: dict[str, object]) -> None:
    document = {**Recorder("r").to_json(), **change}
    recorder = Recorder("r")
    assert not recorder.resume(document, NOW)
    assert (recorder.points.recent, list(recorder.events)) == ([], [])
    assert not recorder.resume(None, NOW)
    assert not recorder.resume([1], NOW)
