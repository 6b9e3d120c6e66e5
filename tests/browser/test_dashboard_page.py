"""The dashboard as a person sees it, in a real browser."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.site import job_site
from coordinator.dashboard.snapshots import DashboardSampler, DashboardSnapshots
from psrpc.v1 import coordinator_pb2 as pb
from tests.browser.conftest import WAIT_MS, Open
from tests.e2e.cluster import JOBS, Process, members, until, wait_until_gone

pytestmark = pytest.mark.browser

expect.set_options(timeout=WAIT_MS)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
AA = 4.5
"""Least contrast of text (WCAG 2.2, success criterion 1.4.3)."""


GROUNDS = ("page", "card", "on-warn", "on-bad")
TEXTS = ("text", "muted", "accent", "good", "warn", "bad", "mode")


@dataclass
class Run:
    """A real job that trains as long as it is looked at."""

    url: str
    run_dir: Path
    up: int
    """The process that starts the others, and starts them again."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    # Epochs of a second or so: with many in one, nothing stays among the newest events.
    settings = ("epochs=100000", "batch_size=2", "checkpoint_every=600")
    options = ["--shards", "2", "--workers", "2", "--mode", "async"]
    options += [word for setting in settings for word in ("--set", setting)]
    job = JOBS / "dense.py"
    up = Process("up", "coordinator", "up", job, *options, "--run-dir", run_dir)
    try:
        url = up.wait_for(r"dashboard (http://\S+)")[1]
        up.wait_for("evaluation epoch-1")
        yield Run(url, run_dir, up.popen.pid)
    finally:
        up.kill(signal.SIGINT)
        up.wait()
        up.end()


@pytest.fixture
def board() -> Iterator[tuple[DashboardSnapshots, str]]:
    """A board without a job, and where it is shown."""
    board = DashboardSnapshots("digits", lambda: 1_800_000_000.0)
    server = DashboardServer("127.0.0.1:0", job_site(board))
    server.start()
    try:
        yield board, server.url
    finally:
        server.stop()


def ask(watched: Any, path: str) -> Any:
    return watched.page.evaluate("path => fetch(path).then(answer => answer.json())", path)


def losses(history: dict[str, Any], before: float) -> list[float]:
    """Those of the whole curve up to a time, in seconds since 1970."""
    points = zip(history["whole"]["at"], history["whole"]["loss"], strict=True)
    return [loss for at, loss in points if at < before and loss is not None]


def drawn(page: Page) -> bool:
    """Whether there is anything on the first chart."""
    found: bool = page.locator(".plot canvas").first.evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
    )
    return found


def test_a_job_is_shown_as_it_is(run: Run, open_page: Open) -> None:
    watched = open_page(run.url)
    page = watched.page
    expect(page.get_by_role("heading", level=1)).to_have_text("dense")
    expect(page.locator(".plot canvas").first).to_be_visible()
    status = ask(watched, "/status.json")["status"]
    progress = page.locator("#progress")
    expect(progress).to_contain_text(f"of {status['total_steps']:,}")
    expect(page.locator("#tiles")).to_contain_text(re.compile(r"epoch-\d+, step [\d,]+"))
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    for worker in status["workers"]:
        expect(page.locator("#workers")).to_contain_text(f"pid {worker['pid']}")
    expect(page.locator("#shards tbody tr")).to_have_count(2)
    for shard in status["shards"]:
        expect(page.locator("#shards")).to_contain_text(shard["address"])
    # What the page shows may be of a moment before.
    page.wait_for_function(
        "least => [...document.querySelectorAll('#staleness tbody tr td:last-child')]"
        ".reduce((sum, cell) => sum + Number(cell.textContent.replaceAll(',', '')), 0) >= least",
        arg=sum(status["staleness_counts"]),
    )
    expect(page.locator("#lanes .checkpoint").first).to_be_visible()
    expect(page.locator("#events")).to_contain_text(re.compile(r"evaluation epoch-\d+ at step"))
    # It goes on by itself.
    expect(progress).not_to_contain_text(f"Step {status['global_step']:,} of")
    # One canvas each for loss, speed twice, staleness, and two metrics of the evaluation.
    expect(page.locator(".plot canvas")).to_have_count(6)
    assert drawn(page)
    assert (watched.complaints, watched.elsewhere) == ([], [])


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_has_to_be_scrolled_sideways(run: Run, open_page: Open, width: int) -> None:
    watched = open_page(run.url, width=width)
    expect(watched.page.locator("#workers tbody tr")).to_have_count(2)
    page_width = watched.page.evaluate("document.documentElement.scrollWidth")
    assert page_width == width
    sizes = watched.page.evaluate(
        "[...document.querySelectorAll('.card')].map(c => [c.scrollWidth, c.clientWidth])"
    )
    assert [size for size in sizes if size[0] > size[1]] == []
    assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(run: Run, open_page: Open, scheme: Any) -> None:
    page = open_page(run.url, scheme=scheme).page
    colours = page.evaluate(
        "names => names.map(name => "
        "getComputedStyle(document.documentElement).getPropertyValue(name).trim())",
        names := [f"--{name}" for name in (*GROUNDS, *TEXTS)],
    )
    colour = dict(zip(names, colours, strict=True))
    assert (luminance(colour["--page"]) > 0.5) == (scheme == "light")
    for text in TEXTS:
        for ground in ("page", "card"):
            assert contrast(colour[f"--{text}"], colour[f"--{ground}"]) >= AA, (text, ground)
    for text, ground in (("--warn", "--on-warn"), ("--bad", "--on-bad"), ("--card", "--accent")):
        assert contrast(colour[text], colour[ground]) >= AA, (text, ground)


def test_a_curve_can_be_read_with_the_keyboard(run: Run, open_page: Open) -> None:
    page = open_page(run.url).page
    plot = page.locator(".plot").first
    expect(plot.locator("canvas")).to_be_visible()
    plot.focus()
    page.keyboard.press("Home")
    expect(page.locator(".chart .value").first).to_contain_text("at ")
    expect(plot).to_have_attribute("aria-label", re.compile("Training loss"))


def test_it_goes_on_when_the_coordinator_is_killed(run: Run, open_page: Open) -> None:
    watched = open_page(run.url)
    page = watched.page
    expect(page.locator(".live")).to_contain_text("Live")
    (pid,) = members(run.run_dir, "coordinator")
    # Otherwise it could be back before the page has looked.
    os.kill(run.up, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        kept = json.loads((run.run_dir / "dashboard.json").read_bytes())
        expect(page.locator("#banners")).to_contain_text("Coordinator away since")
        expect(page.locator("#workers tbody tr")).to_have_count(2)
    finally:
        os.kill(run.up, signal.SIGCONT)
    expect(page.locator("#banners")).not_to_contain_text("Coordinator away since")
    expect(page.locator("#events")).to_contain_text("coordinator started again")
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    after = ask(watched, "/history.json")
    # The curves go on from what was kept.
    known = len(kept["points"]["recent"]["at"])
    assert after["recent"]["at"][:known] == kept["points"]["recent"]["at"]
    # The browser may complain of refused connections only.
    assert [line for line in watched.complaints if "ERR_CONNECTION" not in line] == []


def test_elsewhere_it_is_the_same_page(run: Run, open_page: Open) -> None:
    """``coordinator dashboard``, started when the job has trained for a while."""

    def early() -> list[float]:
        with urllib.request.urlopen(f"{run.url}history.json", timeout=60) as answer:
            return losses(json.load(answer), time.time())

    # The coordinator has just been started again; what it had kept may be of before the first loss.
    until(lambda: early() != [], "a loss in the history")
    began = time.time()
    options = ("--run-dir", run.run_dir, "--bind", "127.0.0.1:0")
    command = Process("dashboard", "coordinator", "dashboard", *options)
    try:
        watched = open_page(command.wait_for(r"dashboard (http://\S+)")[1])
        page = watched.page
        expect(page.get_by_role("heading", level=1)).to_have_text("dense")
        expect(page.locator("#workers tbody tr")).to_have_count(2)
        # The curve begins before the command, and is drawn from there.
        assert losses(ask(watched, "/history.json"), began)
        page.locator(".plot").first.focus()
        page.keyboard.press("Home")
        expect(page.locator(".chart .value").first).to_contain_text("at ")
        assert drawn(page)
        (pid,) = members(run.run_dir, "coordinator")
        os.kill(run.up, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            wait_until_gone([pid])
            expect(page.locator("#banners")).to_contain_text("Coordinator away since")
            expect(page.locator("#banners")).to_contain_text("PS204: nothing listens")
            expect(page.locator("#workers tbody tr")).to_have_count(2)
        finally:
            os.kill(run.up, signal.SIGCONT)
        expect(page.locator("#banners")).not_to_contain_text("Coordinator away since")
        expect(page.locator("#events")).to_contain_text("coordinator started again")
        # All that the browser may complain of is that there was no answer.
        assert [line for line in watched.complaints if "status of 503" not in line] == []
        assert watched.elsewhere == []
    finally:
        command.end()


def test_before_the_job_has_been_read(
    board: tuple[DashboardSnapshots, str], open_page: Open
) -> None:
    watched = open_page(board[1])
    expect(watched.page.locator("#banners")).to_contain_text("The coordinator reads the job")
    expect(watched.page.locator("#workers")).to_contain_text("No worker has joined yet")
    expect(watched.page.locator("#timeline")).to_contain_text("Nothing has happened yet")
    assert watched.complaints == []


def test_names_are_text(
    board: tuple[DashboardSnapshots, str], open_page: Open, tmp_path: Path
) -> None:
    """HTML in the name of a job, worker, metric or error is shown as text."""
    shown, url = board
    shown.open(HOSTILE, tmp_path)
    found = pb.EvaluationResult(evaluation=HOSTILE, global_step=1, results={HOSTILE: 0.5})
    worker = pb.WorkerStatus(
        worker=HOSTILE,
        host=HOSTILE,
        device=HOSTILE,
        state=HOSTILE,
        waiting_for=HOSTILE,
        unreachable=[pb.UnreachableShard(shard=1, for_s=65.0)],
    )
    shown.show(
        pb.GetJobStatusResponse(
            job=HOSTILE,
            run_id=HOSTILE,
            phase="training",
            mode=HOSTILE,
            settings=HOSTILE,
            switching=HOSTILE,
            waiting_for=HOSTILE,
            reason=HOSTILE,
            warnings=[HOSTILE],
            stragglers=[HOSTILE],
            stuck=[HOSTILE],
            newest_checkpoint=HOSTILE,
            loss=0.5,
            total_steps=10,
            workers=[worker],
            shards=[pb.ShardStatus(address=HOSTILE, state=HOSTILE, waiting_for=HOSTILE)],
            evaluations=[found],
            insecure=True,
        )
    )
    watched = open_page(url)
    page = watched.page
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(page.locator("#workers")).to_contain_text(HOSTILE)
    expect(page.locator("#workers")).to_contain_text("cannot reach shard 1 for 1 min 5 s")
    expect(page.locator("#events")).to_contain_text(HOSTILE)
    expect(page.locator("#banners")).to_contain_text("Insecure.")
    assert page.locator("img, body script, iframe").count() == 0
    assert page.title() != "owned"
    assert (watched.complaints, watched.elsewhere) == ([], [])


def test_inline_scripts_do_not_run(board: tuple[DashboardSnapshots, str], open_page: Open) -> None:
    """The second line of defence: the policy, were the first one broken."""
    page = open_page(board[1]).page
    refused = page.evaluate(
        """html => new Promise(resolve => {
            const told = event => resolve(event.effectiveDirective);
            document.addEventListener("securitypolicyviolation", told);
            const made = document.createElement("div");
            made.innerHTML = html;
            document.body.append(made);
        })""",
        '<img src="/none" onerror="document.title=\'owned\'">',
    )
    assert refused == "script-src-attr"
    assert page.title() != "owned"


def test_the_end_is_told_and_stays(open_page: Open, tmp_path: Path) -> None:
    own = DashboardSnapshots("digits", lambda: 1_800_000_000.0)
    server = DashboardServer("127.0.0.1:0", job_site(own))
    server.start()
    status = pb.GetJobStatusResponse(job="digits", phase="training", global_step=9, total_steps=10)
    chronicle = DashboardSampler(own)
    chronicle.open("r", tmp_path, lambda: status)
    chronicle.tick()
    page = open_page(server.url).page
    expect(page.locator("#head")).to_contain_text("training")
    status = pb.GetJobStatusResponse(job="digits", phase="done", global_step=10, total_steps=10)

    def end() -> None:
        asyncio.run(chronicle.close())
        server.stop()

    # The page asks meanwhile.
    ending = threading.Thread(target=end)
    ending.start()
    expect(page.locator("#banners")).to_contain_text("The job is done.")
    ending.join()
    expect(page.locator("#progress")).to_contain_text("100 %")
    expect(page.locator("#head")).to_contain_text("The coordinator has left")


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2.2, definitions)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """1 to 21."""
    lower, higher = sorted((luminance(one), luminance(other)))
    ratio = (higher + 0.05) / (lower + 0.05)
    assert math.isfinite(ratio)
    return ratio
