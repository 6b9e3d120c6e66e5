"""One fork server for several clusters at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from coordinator.launch.warm_start import ChildProcess, WarmStart, start_fresh


class SharedForks:
    """The fork server of clusters that run in threads of this process. Thread-safe.

    :meth:`WarmStart.reap` takes every child of this process that it is not told to leave alone. So
    this class keeps the process ids of all clusters.
    """

    def __init__(self, warm_start: WarmStart | None) -> None:
        """``warm_start`` is started already; None starts all processes fresh."""
        self._warm_start = warm_start
        self._lock = threading.Lock()
        # Process ids by cluster; guarded by _lock, as is all of _warm_start.
        self._known: dict[ForkShare, set[int]] = {}

    def share(self) -> ForkShare:
        """Adds a cluster; returns its access to the fork server."""
        share = ForkShare(self)
        with self._lock:
            self._known[share] = set()
        return share

    def waits(self, command: Sequence[str], run_dir: Path) -> bool:
        """See :meth:`WarmStart.waits`."""
        with self._lock:
            return self._warm_start is not None and self._warm_start.waits(command, run_dir)

    def start_process(
        self,
        share: ForkShare,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        run_dir: Path,
        note: Callable[[str], object],
    ) -> ChildProcess:
        """See :meth:`WarmStart.start_process`."""
        with self._lock:
            if self._warm_start is None:
                process = start_fresh(command, environment, output)
            else:
                process = self._warm_start.start_process(
                    command, environment, output, run_dir, note
                )
            self._known[share].add(process.pid)
            return process

    def reap(self, share: ForkShare, known: Collection[int]) -> None:
        """Reaps children that no cluster knows; ``known`` has the process ids of ``share``."""
        with self._lock:
            self._known[share] = set(known)
            if self._warm_start is not None:
                self._warm_start.reap(set().union(*self._known.values()))

    def close(self, share: ForkShare) -> None:
        """Forgets a cluster whose processes have all ended."""
        with self._lock:
            del self._known[share]


class ForkShare:
    """The access of one cluster's supervisor to :class:`SharedForks`."""

    def __init__(self, forks: SharedForks) -> None:
        self._forks = forks

    def __enter__(self) -> ForkShare:
        return self

    def __exit__(self, *exception: object) -> None:
        self._forks.close(self)

    def waits(self, command: Sequence[str], run_dir: Path) -> bool:
        """See :meth:`WarmStart.waits`."""
        return self._forks.waits(command, run_dir)

    def start_process(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        run_dir: Path,
        note: Callable[[str], object],
    ) -> ChildProcess:
        """See :meth:`WarmStart.start_process`."""
        return self._forks.start_process(self, command, environment, output, run_dir, note)

    def reap(self, known: Collection[int]) -> None:
        """See :meth:`WarmStart.reap`."""
        self._forks.reap(self, known)
