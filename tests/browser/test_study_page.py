"""The page of a study as a person sees it, in a real browser."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from coordinator.dashboard.server import DashboardServer
from coordinator.search.points import Space
from coordinator.search.space import Range, choice, log, log_integers
from coordinator.search.study_page import IMPORTANCE_TRIALS
from coordinator.search.trials import StudyLimits, StudyMetric, TrialValue
from coordinator.tune.optuna_study import OptunaStudy, StudyRules
from coordinator.tune.page import StudyPage
from tests.browser.conftest import WAIT_MS, Open
from tests.e2e.cluster import JOBS, Process

pytestmark = pytest.mark.browser
pytest.importorskip("optuna")

expect.set_options(timeout=WAIT_MS)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
TRIALS = 14


def recorded(
    folder: Path, trials: int, ranges: dict[str, Range], reason: str = "out of memory"
) -> tuple[OptunaStudy, StudyPage]:
    """A study in Optuna's journal whose trials are told what they have reached; the second one
    fails, the third one is pruned, and the last one runs on."""
    space = Space(ranges)
    study = OptunaStudy(
        folder / "journal.log", "job", StudyRules(space, "random", "none", "max", 0, 3)
    )
    for number in range(trials):
        rate = float(str(study.ask().point["rate"]))
        if number == trials - 1:
            break
        for epoch in (1, 2, 3):
            study.report(number, TrialValue(epoch, rate * epoch))
        if number == 1:
            study.tell(number, "failed", reason=reason)
        elif number == 2:
            study.tell(number, "pruned", reason="after epoch 3")
        else:
            study.tell(number, "complete", rate * 3)
    page = StudyPage(folder, StudyMetric("max", "accuracy"), StudyLimits(20, 2, 3), space)
    page.show(study.records(), ())
    page.show_importance(study.importance())
    return study, page


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[DashboardServer] = []

    def served(page: StudyPage) -> str:
        server = DashboardServer("127.0.0.1:0", page.site)
        server.start()
        servers.append(server)
        return server.url

    yield served
    for server in servers:
        server.stop()


RANGES: dict[str, Range] = {
    "rate": log(1e-4, 0.1),
    "optimizer.width": log_integers(8, 512),
    "kind": choice("a", "b", None),
}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_study_is_shown_as_it_is(
    tmp_path: Path, serve: Any, open_page: Open, width: int, scheme: str
) -> None:
    study, page = recorded(tmp_path, TRIALS, RANGES)
    watched = open_page(serve(page), width=width, scheme=scheme)
    seen = watched.page
    expect(seen.locator("#trials tbody tr")).to_have_count(TRIALS)
    best = max((each for each in study.records() if each.value), key=lambda each: each.value or 0)
    expect(seen.locator("#trials tr.best")).to_contain_text("the best")
    expect(seen.locator("#trials tr.best td").first).to_contain_text(str(best.number))
    expect(seen.locator("#trials")).to_contain_text("out of memory")
    expect(seen.locator("#trials")).to_contain_text("after epoch 3")
    # The one that runs has no value yet.
    expect(seen.locator("#values circle")).to_have_count(TRIALS - 1)
    expect(seen.locator("#values .sofar")).to_have_count(1)
    expect(seen.locator("#parallel path")).to_have_count(TRIALS - 2)
    expect(seen.locator("#importance .share")).to_have_count(3)
    expect(seen.locator("#importance .share").first).to_contain_text("rate")
    expect(seen.locator("#foot")).to_contain_text("PED-ANOVA")
    assert seen.evaluate("document.documentElement.scrollWidth") == width
    sizes = seen.evaluate(
        "[...document.querySelectorAll('.card:not(.table)')]"
        ".map(c => [c.scrollWidth, c.clientWidth])"
    )
    assert [size for size in sizes if size[0] > size[1]] == []
    page.end("20 trials made", study.records())
    expect(seen.locator("#banners")).to_contain_text("20 trials made")
    expect(seen.locator("#trials")).to_contain_text("stopped")
    assert (watched.complaints, watched.elsewhere) == ([], [])


def test_with_few_trials_the_page_says_what_is_missing(
    tmp_path: Path, serve: Any, open_page: Open
) -> None:
    _, page = recorded(tmp_path, 3, RANGES)
    watched = open_page(serve(page))
    words = f"needs {IMPORTANCE_TRIALS} complete trials"
    expect(watched.page.locator("#importance")).to_contain_text(words)
    assert watched.complaints == []


def test_names_and_reasons_are_text(tmp_path: Path, serve: Any, open_page: Open) -> None:
    ranges: dict[str, Range] = {"rate": log(1e-4, 0.1), HOSTILE: choice(HOSTILE, "b")}
    _, page = recorded(tmp_path, 4, ranges, reason=HOSTILE)
    watched = open_page(serve(page))
    expect(watched.page.locator("#trials tbody tr")).to_have_count(4)
    expect(watched.page.locator("#trials")).to_contain_text(HOSTILE)
    assert watched.page.locator("img, body script, iframe").count() == 0
    assert watched.page.title() != "owned"
    assert (watched.complaints, watched.elsewhere) == ([], [])


def test_a_real_study_leads_to_the_dashboards_of_its_trials(
    tmp_path: Path, open_page: Open
) -> None:
    options = ["--run-dir", tmp_path / "study", "--sampler", "random", "--pruner", "none"]
    options += ["--space", "optimizer.learning_rate=log(1e-5,1e-4)", "--set", "epochs=100000"]
    tune = Process("tune", "coordinator", "tune", JOBS / "searched.py", *options)
    try:
        watched = open_page(tune.wait_for(r"dashboard (http://\S+)")[1])
        link = watched.page.locator("#trials a")
        expect(link).to_have_count(1)
        expect(watched.page.locator("#values circle")).to_have_count(1)
        own = open_page(str(link.get_attribute("href"))).page
        expect(own.locator("#workers tbody tr")).to_have_count(1)
        expect(own.get_by_role("heading", level=1)).to_have_text("searched")
        assert (watched.complaints, watched.elsewhere) == ([], [])
        tune.kill(signal.SIGINT)
        expect(watched.page.locator("#banners")).to_contain_text(
            re.compile("stopped; the same command goes on")
        )
        expect(watched.page.locator("#trials")).to_contain_text("stopped")
        assert tune.wait() == 130
        assert "\n0,stopped," in (tmp_path / "study/study.csv").read_text()
    finally:
        tune.end()
