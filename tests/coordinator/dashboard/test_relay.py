"""Dashboards elsewhere show of a job the same as the coordinator's own page."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from coordinator.dashboard.relay import Relay
from coordinator.dashboard.snapshots import PAGE, WATCHED_S, DashboardSnapshots, Subscribers
from psrpc.core.errors import CoordinatorUnreachable
from psrpc.v1 import coordinator_pb2 as pb

NOW = 1_800_000_000.0


class Clock:
    """Seconds, as a test says."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def board_of_a_run(clock: Clock, run_dir: Path) -> DashboardSnapshots:
    """Two looks at a job, a second apart: of the first, nothing is known but the step."""
    board = DashboardSnapshots("digits", clock)
    board.open("r", run_dir)
    status = pb.GetJobStatusResponse(job="digits", run_id="r", phase="training", loss=float("nan"))
    board.show(status)
    clock.now += 1
    later = pb.GetJobStatusResponse(
        job="digits", run_id="r", phase="training", global_step=7, loss=0.5, warnings=["hot"]
    )
    board.show(later)
    return board


def over_the_wire(
    board: DashboardSnapshots, viewer: str = "ipv4:10.0.0.1:1"
) -> pb.GetDashboardResponse:
    return pb.GetDashboardResponse.FromString(board.message(viewer).SerializeToString())


def test_the_page_elsewhere_is_the_page_here(tmp_path: Path) -> None:
    clock, local = Clock(), Clock(5.0)
    board = board_of_a_run(clock, tmp_path)
    relay = Relay(local)
    relay.took(over_the_wire(board))
    here, there = board.status(), relay.status()
    assert there == here
    assert here["status"]["loss"] == 0.5
    history = relay.history()
    assert history == board.history()
    assert history["recent"]["loss"] == [None, 0.5]
    assert [event["text"] for event in history["events"]] == ["digits: training", "warning: hot"]
    # Its clock goes on, the look stays as old as it is.
    local.now += 3
    assert relay.status()["now"] == here["now"] + 3
    assert relay.status()["looked"] == here["looked"]


def test_before_the_job_has_been_looked_at() -> None:
    board = DashboardSnapshots("digits", Clock())
    relay = Relay(Clock())
    relay.took(over_the_wire(board))
    assert relay.status()["status"] is None
    assert relay.history() == board.history()


def test_a_coordinator_that_is_away_is_not_made_up(tmp_path: Path) -> None:
    relay = Relay(Clock())
    with pytest.raises(CoordinatorUnreachable, match="has not been asked"):
        relay.status()
    answer = over_the_wire(board_of_a_run(Clock(), tmp_path))
    relay.took(answer)
    relay.lost(CoordinatorUnreachable("gone"))
    for ask in (relay.status, relay.history):
        with pytest.raises(CoordinatorUnreachable, match="gone"):
            ask()
    assert not relay.ended
    relay.took(answer)
    assert relay.status()["status"]["global_step"] == 7


@pytest.mark.parametrize("phase", ["done", "failed"])
def test_it_knows_when_the_job_has_ended(phase: str) -> None:
    relay = Relay(Clock())
    relay.took(pb.GetDashboardResponse(status=pb.GetJobStatusResponse(phase=phase)))
    relay.lost(CoordinatorUnreachable("gone"))
    assert relay.ended


def test_the_end_waits_for_current_subscribers_only() -> None:
    clock = Clock()
    subscribers = Subscribers(clock)
    subscribers.asked("long ago")
    clock.now += WATCHED_S
    subscribers.asked(PAGE)
    subscribers.asked("elsewhere")
    subscribers.changed()
    assert not subscribers.wait_until_seen(0)
    subscribers.asked(PAGE)
    assert not subscribers.wait_until_seen(0)
    subscribers.asked("elsewhere")
    assert subscribers.wait_until_seen(0)


def test_the_last_subscriber_wakes_the_wait_for_the_end() -> None:
    subscribers = Subscribers(Clock())
    subscribers.asked(PAGE)
    subscribers.changed()
    asking = threading.Thread(target=subscribers.asked, args=(PAGE,))
    asking.start()
    assert subscribers.wait_until_seen(30)
    asking.join()


def test_remote_dashboards_are_subscribers(tmp_path: Path) -> None:
    board = board_of_a_run(Clock(), tmp_path)
    board.message("one")
    board.message("other")
    board.show(pb.GetJobStatusResponse(phase="done"))
    board.message("one")
    assert not board.subscribers.wait_until_seen(0)
    assert board.message("other").status.phase == "done"
    assert board.subscribers.wait_until_seen(0)
