"""The dashboard's server: real sockets, and what it does not let anyone do."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog.testing

from coordinator.dashboard.app import HTML, PAGES, WEB
from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.site import job_site
from coordinator.dashboard.snapshots import NAME, DashboardSampler, DashboardSnapshots
from psrpc.core.errors import InvalidArgument, PortInUse
from psrpc.metrics.http_head import known_host
from psrpc.v1 import coordinator_pb2 as pb

NOW = 1_800_000_000.0
HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Dashboard:
    board: DashboardSnapshots
    server: DashboardServer

    @property
    def port(self) -> int:
        return int(self.server.url.rstrip("/").rpartition(":")[2])

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    board = DashboardSnapshots("digits", lambda: NOW)
    server = DashboardServer("127.0.0.1:0", job_site(board))
    server.start()
    try:
        yield Dashboard(board, server)
    finally:
        server.stop()


@pytest.mark.slow
def test_every_file_of_the_page_is_served_and_nothing_else(dashboard: Dashboard) -> None:
    pages = {"/": ("index.html", HTML), **PAGES}
    for path, (name, kind) in pages.items():
        answer = dashboard.ask(path)
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
        assert answer.body == (WEB / name).read_bytes()
    files = {str(file.relative_to(WEB)) for file in WEB.rglob("*") if file.is_file()}
    elsewhere = {"study.html", "vendor/LICENSE.uPlot.txt"}
    assert files == {name for name, _ in pages.values()} | elsewhere
    for path in ("/dashboard.py", "/../board.py", "/%2e%2e/board.py", "/vendor/", "/ledger.sqlite"):
        assert dashboard.ask(path).status == 404


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/status.json", "/nowhere"])
def test_every_answer_says_what_a_browser_may_do_with_it(dashboard: Dashboard, path: str) -> None:
    headers = dashboard.ask(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_it_only_reads(dashboard: Dashboard, method: str) -> None:
    answer = dashboard.ask("/status.json", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.slow
def test_head_has_no_body(dashboard: Dashboard) -> None:
    answer = dashboard.ask("/status.json", "HEAD")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_a_name_that_another_site_may_have_made_is_refused(dashboard: Dashboard, host: str) -> None:
    answer = dashboard.ask("/status.json", host=host)
    assert answer.status == 421
    assert b"digits" not in answer.body


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LOCALHOST.:8080", True),
        ("127.0.0.1:5080", True),
        ("10.1.2.3:1", True),
        ("[::1]:5080", True),
        ("coordinator:5080", True),
        ("coordinator.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("127.0.0.1:x", False),
        ("::1", False),
        ("0x7f.1", False),
        ("", False),
    ],
)
def test_hosts_that_are_ours(host: str, known: bool) -> None:
    assert known_host(host, ["Coordinator"]) == known


@pytest.mark.slow
def test_the_status_is_that_of_the_status_command_as_json(tmp_path: Path) -> None:
    board = DashboardSnapshots("digits", lambda: NOW)
    server = DashboardServer("127.0.0.1:0", job_site(board))
    server.start()
    try:
        shown = Dashboard(board, server)
        early = json.loads(shown.ask("/status.json").body)
        assert (early["status"], early["job"]) == (None, "digits")
        status = pb.GetJobStatusResponse(
            job=HOSTILE, phase="training", loss=float("nan"), run_id="r", warnings=[HOSTILE]
        )
        chronicle = DashboardSampler(board)
        chronicle.open(
            "r", tmp_path, lambda: pb.GetJobStatusResponse.FromString(status.SerializeToString())
        )
        chronicle.tick()
        answer = shown.ask("/status.json")
        look = json.loads(answer.body)
        assert answer.headers["content-type"] == "application/json"
        assert (look["now"], look["looked"], look["started"]) == (NOW, NOW, NOW)
        assert look["status"]["job"] == HOSTILE
        assert look["status"]["loss"] is None
        history = json.loads(shown.ask("/history.json").body)
        assert history["recent"]["at"] == history["whole"]["at"] == [NOW]
        texts = [event["text"] for event in history["events"]]
        assert texts == [f"{HOSTILE}: training", f"warning: {HOSTILE}"]
        status.phase = "done"
        closing = threading.Thread(target=asyncio.run, args=(chronicle.close(),))
        closing.start()
        # While a browser watches, it stays until the end was shown.
        while json.loads(shown.ask("/status.json").body)["status"]["phase"] != "done":
            pass
        closing.join()
    finally:
        server.stop()
    # Its successor goes on from there.
    second = DashboardSnapshots("digits", lambda: NOW + 30)
    second.open("r", tmp_path)
    events = [event["text"] for event in second.history()["events"]]
    assert events == [
        *texts,
        f"{HOSTILE}: done",
        "coordinator started again, 30.0 s after it was last seen",
    ]


def test_one_that_dies_at_once_is_known_to_the_next(tmp_path: Path) -> None:
    DashboardSnapshots("digits", lambda: NOW).open("r", tmp_path)
    second = DashboardSnapshots("digits", lambda: NOW)
    second.open("r", tmp_path)
    assert [event["text"] for event in second.history()["events"]] == ["coordinator started again"]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"null", b'{"format":1}'])
def test_a_damaged_history_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    board = DashboardSnapshots("digits", lambda: NOW)
    board.open("r", tmp_path)
    assert board.history()["events"] == []
    assert json.loads((tmp_path / NAME).read_bytes())["run_id"] == "r"


def test_a_disk_that_refuses_costs_the_history_only(tmp_path: Path) -> None:
    board = DashboardSnapshots("digits", lambda: NOW)
    with structlog.testing.capture_logs() as said:
        board.open("r", tmp_path / "nowhere")
        board.save()
    assert [(s["event"], s["why"]) for s in said] == [
        ("the dashboard's history is not kept", "No such file or directory")
    ]
    assert board.history()["events"] == []


@pytest.mark.slow
def test_its_port_can_be_had_again_at_once_and_not_twice(dashboard: Dashboard) -> None:
    board = DashboardSnapshots("digits", lambda: NOW)
    with pytest.raises(PortInUse, match=f"127.0.0.1:{dashboard.port}.*say another --dashboard"):
        DashboardServer(f"127.0.0.1:{dashboard.port}", job_site(board)).start()
    with socket.socket() as held:
        # As `coordinator up` keeps it for its coordinator.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        for _ in range(2):
            server = DashboardServer(f"127.0.0.1:{held.getsockname()[1]}", job_site(board))
            server.start()
            try:
                assert Dashboard(board, server).ask("/").status == 200
            finally:
                server.stop()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("0.0.0.0:0", "without encryption.*`coordinator dashboard "),
        ("no.such.invalid:1", "--dashboard no.such"),
    ],
)
def test_others_may_not_look_unless_it_was_said(address: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        DashboardServer(address, job_site(DashboardSnapshots("digits", lambda: NOW))).start()


@pytest.mark.slow
def test_insecure_lets_others_look() -> None:
    server = DashboardServer(
        "0.0.0.0:0", job_site(DashboardSnapshots("digits", lambda: NOW)), insecure=True
    )
    server.start()
    server.stop()
    assert server.url.startswith("http://127.0.0.1:")


def test_without_an_address_it_does_nothing() -> None:
    server = DashboardServer(None, job_site(DashboardSnapshots("digits", lambda: NOW)))
    server.start()
    server.stop()
    assert server.url == ""
