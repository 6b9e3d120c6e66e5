"""Plants every bug, one at a time, and shows who caught it: ``make planted``.

First all catchers run on the untouched source, where they must pass; a test that fails anyway
catches nothing. Then each patch is applied to a copy of the tree, and its catchers run until one of
them fails. Two copies are worked on side by side.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from tests.planted.patches import BadPatch, Planted, Tree, all_planted, rebase

CATCH_S = 240.0
"""A catcher that takes longer has hung, which catches nothing."""

_FAILED = 1
"""What pytest and the simulator end with when something was wrong; other numbers are mistakes."""


@dataclass(frozen=True)
class Verdict:
    """Result for one planted bug. ``by`` is the catcher, ``output`` the end of its words."""

    planted: Planted
    outcome: Literal["caught", "missed", "broken"]
    by: str = ""
    seconds: float = 0.0
    output: str = ""


def run_catcher(catcher: str, tree: Tree) -> tuple[int, str]:
    """Runs a catcher on a tree; its exit status and the last lines that it wrote."""
    if not _simulates(catcher):
        return run_tests([catcher], tree, CATCH_S)
    _, *flags, seeds = catcher.split()
    return _run(["tests.sim", *flags, "--seeds", seeds, "--jobs", "1"], tree, CATCH_S)


def run_tests(ids: Sequence[str], tree: Tree, timeout_s: float) -> tuple[int, str]:
    """Runs tests on a tree in one process; its exit status and the last lines that it wrote."""
    return _run(["pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", *ids], tree, timeout_s)


def _simulates(catcher: str) -> bool:
    return catcher.startswith("sim ")


def _run(arguments: list[str], tree: Tree, timeout_s: float) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree.directory), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tree.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"it took longer than {timeout_s:.0f} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-25:])


def judge(planted: Planted, tree: Tree) -> Verdict:
    """Plants one bug and sees who catches it."""
    began = time.monotonic()
    try:
        tree.plant(planted)
    except BadPatch as error:
        return Verdict(planted, "broken", output=str(error))
    try:
        output = ""
        for catcher in planted.catchers:
            status, output = run_catcher(catcher, tree)
            if status == _FAILED:
                return Verdict(planted, "caught", catcher, time.monotonic() - began)
            if status:
                why = f"{catcher} ended with {status}, which is no verdict:\n{output}"
                return Verdict(planted, "broken", catcher, time.monotonic() - began, why)
        return Verdict(planted, "missed", "", time.monotonic() - began, output)
    finally:
        tree.take_out(planted)


def shares(catchers: Sequence[str], jobs: int) -> list[list[str]]:
    """Divides catchers for :func:`untouched`: seeds one by one, tests into one share for each job.

    Starting Python and TensorFlow takes longer than most of the tests.
    """
    seeds = [[catcher] for catcher in catchers if _simulates(catcher)]
    tests = [catcher for catcher in catchers if not _simulates(catcher)]
    return [*seeds, *(share for job in range(jobs) if (share := tests[job::jobs]))]


def untouched(share: Sequence[str], tree: Tree) -> list[str]:
    """Failures of a share of catchers on the source as it is."""
    if _simulates(share[0]):
        status, output = run_catcher(share[0], tree)
    else:
        status, output = run_tests(share, tree, CATCH_S * len(share))
    if not status:
        return []
    return [f"a catcher fails on the source as it is ({status}):\n{output}"]


def main() -> int:
    """Plants all bugs, or those that are named; 0 if every one was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="patches, without .patch; default: all")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--rebase", action="store_true", help="write patches anew, and run nothing")
    args = parser.parse_args()
    chosen = [p for p in all_planted() if not args.names or p.name in args.names]
    unknown = set(args.names) - {p.name for p in chosen}
    if unknown or not chosen:
        parser.error(f"no such patch: {', '.join(sorted(unknown)) or 'there are none'}")
    if args.rebase and not args.names:
        parser.error("--rebase needs the names of patches")
    if args.rebase:
        with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
            tree = Tree(Path(scratch) / "tree")
            for planted in chosen:
                rebase(planted, tree.directory)
        return 0
    say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for index in range(args.jobs):
            trees.put(Tree(Path(scratch) / str(index)))

        def with_tree(planted: Planted) -> Verdict:
            tree = trees.get()
            try:
                return judge(planted, tree)
            finally:
                trees.put(tree)

        def check(share: Sequence[str]) -> list[str]:
            tree = trees.get()
            try:
                return untouched(share, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            catchers = sorted({catcher for p in chosen for catcher in p.catchers})
            checks = pool.map(check, shares(catchers, args.jobs))
            wrong = [text for texts in checks for text in texts]
            for text in wrong:
                say(text)
            if wrong:
                return 1
            say(f"{len(catchers)} catchers pass on the source as it is")
            verdicts = []
            for verdict in pool.map(with_tree, chosen):
                verdicts.append(verdict)
                by = f" by {verdict.by}" if verdict.by else ""
                say(f"{verdict.seconds:5.1f} s  {verdict.planted.name}: {verdict.outcome}{by}")
                if verdict.outcome != "caught":
                    say(verdict.output)
    caught = sum(v.outcome == "caught" for v in verdicts)
    seconds = time.monotonic() - began
    say(f"{caught} of {len(verdicts)} planted bugs caught in {seconds:.0f} s")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
