"""Clusters of one process that share a fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

from coordinator.launch.shared_forks import SharedForks
from coordinator.launch.warm_start import WarmStart


class Reaping(WarmStart):
    """Remembers which children must not be reaped."""

    def __init__(self) -> None:
        super().__init__(os.environ)
        self.known: list[set[int]] = []

    def reap(self, known: Collection[int]) -> None:
        self.known.append(set(known))


def test_no_cluster_reaps_the_children_of_another(tmp_path: Path) -> None:
    warm_start = Reaping()
    forks = SharedForks(warm_start)
    null = os.open(os.devnull, os.O_WRONLY)
    one, other = forks.share(), forks.share()
    started = other.start_process([sys.executable, "-c", ""], {}, null, tmp_path, print)
    # Before the other's supervisor has told of its child.
    one.reap([1, 2])
    assert warm_start.known[-1] == {1, 2, started.pid}
    started.wait()
    other.reap([3])
    with one:
        one.reap([4])
        assert warm_start.known[-1] == {3, 4}
    other.reap([])
    assert warm_start.known[-1] == set()
    os.close(null)


def test_without_a_server_processes_start_fresh(tmp_path: Path) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    with SharedForks(None).share() as share:
        assert not share.waits(["worker"], tmp_path)
        assert share.start_process(["true"], dict(os.environ), null, tmp_path, print).wait() == 0
        share.reap([])
    os.close(null)
