"""``make screenshots``: trains MNIST with four workers, searches a small job, and takes the
pictures that docs show."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, FloatRect, expect

from tests.browser.chromium import Scheme, chromium, new_page
from tests.e2e.cluster import EXAMPLES, JOBS, ROOT, Process

FIGURES = ROOT / "docs/figures"

WORKERS = 4
JOB = EXAMPLES / "mnist_dnn.py"
SETTINGS = ("epochs=40", "batch_size=200", "optimizer.momentum=0", "checkpoint_every=500")

LAST = 8
"""The epoch after whose evaluation the pictures are taken."""

PICTURES: tuple[tuple[str, int, Scheme], ...] = (
    ("dashboard-light", 1280, "light"),
    ("dashboard-dark", 1280, "dark"),
    ("dashboard-phone-light", 390, "light"),
    ("dashboard-phone-dark", 390, "dark"),
)
"""File, width in pixels, by day or by night."""

STUDY = (
    *("--trials", "16", "--parallel", "2", "--pruner", "none"),
    *("--space", "optimizer.learning_rate=log(1e-4, 0.3)"),
    *("--space", "batch_size=log_integers(4, 64)"),
    *("--space", "engine=choice(numpy, keras)"),
)
STUDY_ENDED = 13
"""The number of ended trials of the study when its pictures are taken."""

STUDY_PICTURES: tuple[tuple[str, int, Scheme], ...] = (
    ("study-light", 1280, "light"),
    ("study-dark", 1280, "dark"),
)

TALLEST = 2600
"""Pixels; a phone's page is longer, and the rest of it is lists."""

COLOURS = 128

WAIT_MS = 120_000


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        take_study(browser, Path(directory) / "study")
        options = ["--shards", "2", "--workers", str(WORKERS), "--mode", "async"]
        options += [word for setting in SETTINGS for word in ("--set", setting)]
        run_dir = Path(directory) / "run"
        job = Process("up", "coordinator", "up", JOB, *options, "--run-dir", run_dir)
        try:
            url = job.wait_for(r"dashboard (http://\S+)")[1]
            for epoch in range(1, LAST + 1):
                job.wait_for(rf"evaluation epoch-{epoch} ")
            for name, width, scheme in PICTURES:
                path = FIGURES / f"{name}.png"
                take(browser, url, width, scheme, path)
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")  # noqa: T201
        finally:
            job.kill(signal.SIGINT)
            job.wait()
            job.end()
    return 0


def take_study(browser: Browser, run_dir: Path) -> None:
    """Takes the pictures of a study under way."""
    job = Process("tune", "coordinator", "tune", JOBS / "searched.py", *STUDY, "--run-dir", run_dir)
    try:
        url = job.wait_for(r"dashboard (http://\S+)")[1]
        job.wait_for(rf"{STUDY_ENDED} of 16 trials")
        for name, width, scheme in STUDY_PICTURES:
            page = new_page(browser, width, scheme)
            page.goto(url)
            expect(page.locator("#importance .share").first).to_be_visible(timeout=WAIT_MS)
            path = FIGURES / f"{name}.png"
            save(page.screenshot(full_page=True), path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")  # noqa: T201
            page.close()
    finally:
        job.kill(signal.SIGINT)
        job.wait()
        job.end()


def take(browser: Browser, url: str, width: int, scheme: Scheme, path: Path) -> None:
    """One picture, when the page shows all of the job."""
    page = new_page(browser, width, scheme)
    try:
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        expect(page.locator("#workers tbody tr")).to_have_count(WORKERS, timeout=WAIT_MS)
        expect(page.locator("#lanes .checkpoint").first).to_be_visible(timeout=WAIT_MS)
        # Loss, two metrics of the evaluation, speed twice, and staleness.
        expect(page.locator(".plot canvas")).to_have_count(6, timeout=WAIT_MS)
        height: int = page.evaluate("document.documentElement.scrollHeight")
        whole = FloatRect(x=0, y=0, width=width, height=min(height, TALLEST))
        save(page.screenshot(full_page=True, clip=whole), path)
    finally:
        page.close()


def save(png: bytes, path: Path) -> None:
    """In few colours, a third as large: there is nothing but flat areas and letters."""
    with Image.open(io.BytesIO(png)) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
