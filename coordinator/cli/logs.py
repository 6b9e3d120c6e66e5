"""``coordinator logs``: shows the logs of all processes of a run, merged by time."""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from psrpc.core.errors import InvalidArgument
from psrpc.core.names import ADDRESS, JOB, RUNS
from psrpc.core.text import sanitize, sanitize_lines
from psrpc.files.run_paths import newest_run
from psrpc.files.storage import open_regular, unreadable
from psrpc.options.declaration import run_path

LOGS = "logs"
POLL_S = 0.2
"""Poll interval of ``--follow``."""

QUIET = 10
"""After the coordinator's end, ``--follow`` ends with this many empty polls in a row."""

LONGEST = 64 << 10
"""Maximum of bytes shown of a line."""

Stamped = tuple[float, int, str]
"""The time of a line (seconds since 1970), the index of its process, and the line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator logs``."""
    parser.description = "Shows the logs of a run that `coordinator up` started, merged by time."
    parser.add_argument(
        "processes",
        nargs="*",
        metavar="PROCESS",
        help="coordinator, shard-0, worker-a, ...; default: all",
    )
    parser.add_argument(
        "--run-dir", type=run_path, metavar="DIR", help="the run; default: the newest under runs/"
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with what is written, until the run ends"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the logs; returns 0, or 130 if ``--follow`` was interrupted.

    Raises:
        InvalidArgument: no such run or process; names the existing ones.
    """
    run_dir = args.run_dir or newest_run()
    if run_dir is None:
        raise InvalidArgument(f"there is no run under {RUNS}/; say --run-dir DIR", code="PS125")
    logs = [Log(path) for path in find_logs(run_dir, args.processes)]
    try:
        _show(logs)
        if args.follow:
            follow_logs(run_dir, args.processes, logs)
    except KeyboardInterrupt:
        return 130
    finally:
        for log in logs:
            log.close()
    return 0


class Log:
    """A log file that may still grow. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise InvalidArgument(unreadable(path, error), code="PS406") from None
        self._stamp = 0.0
        self._rest = b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def lines(self, last: bool = False) -> Iterator[tuple[float, str]]:
        """Yields the lines since the last call, each with its time. A line without a time, as in a
        traceback, has that of the line before. An incomplete line waits for the next call, unless
        this is the ``last`` one."""
        while raw := self._file.readline(LONGEST):
            self._rest = (self._rest + raw)[:LONGEST]
            if raw.endswith(b"\n"):
                yield self._stamped()
        if last and self._rest:
            yield self._stamped()

    def _stamped(self) -> tuple[float, str]:
        line, self._rest = self._rest.decode(errors="replace").rstrip("\n"), b""
        self._stamp = line_stamp(line) or self._stamp
        return self._stamp, line


def line_stamp(line: str) -> float | None:
    """Returns the time of a structured log line in seconds since 1970; None if it has none. Console
    logs have local time, JSON logs UTC."""
    from datetime import datetime

    if line.startswith("{"):
        from psrpc.core.document import anything, mapped, parse_json

        try:
            # Log values may be NaN.
            said = mapped(anything)(parse_json(line.encode(), finite=False), "").get("timestamp")
        except ValueError:
            return None
    else:
        said = line.partition(" ")[0]
    try:
        return datetime.fromisoformat(said).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def merged(logs: Sequence[Log], last: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the process and text of each line since the last call, by time. Lines of one process
    keep their order, whatever its clock does."""

    def stamped(number: int) -> Iterable[Stamped]:
        newest = 0.0
        for stamp, line in logs[number].lines(last):
            newest = max(newest, stamp)
            yield newest, number, line

    for _, number, line in heapq.merge(
        *(stamped(number) for number in range(len(logs))), key=lambda item: item[:2]
    ):
        yield logs[number].name, line


def follow_logs(
    run_dir: Path,
    processes: Sequence[str],
    logs: list[Log],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows lines as they are written, also by processes that start later, until the run ends."""
    quiet = 0
    while quiet < QUIET:
        pause(POLL_S)
        known = {log.name for log in logs}
        for path in find_logs(run_dir, processes):
            if path.stem not in known:
                logs.append(Log(path))
        said = _show(logs)
        quiet = 0 if said or (run_dir / ADDRESS).exists() else quiet + 1
    _show(logs, last=True)


def find_logs(run_dir: Path, processes: Sequence[str]) -> list[Path]:
    """Returns the log files of a run, of ``processes`` alone if any are named.

    Raises:
        InvalidArgument: no such run or process (names the existing ones), or the run's logs are
            elsewhere (says where).
    """
    there = sorted((run_dir / LOGS).glob("*.log"))
    if not there and (run_dir / JOB).exists():
        raise InvalidArgument(
            f"the processes of {run_dir} were started by hand, and each writes its log to its own "
            "standard error: look where they were started; with compose, `docker compose -f "
            "docker/compose.yml logs --follow`, with Kubernetes `kubectl logs`, with systemd "
            "`journalctl -u UNIT`",
            code="PS126",
        )
    if not there:
        raise InvalidArgument(
            f"{run_dir} has no {LOGS}/*.log and holds no run; say --run-dir with the directory of "
            "a run of `coordinator up`",
            code="PS125",
        )
    names = {path.stem: path for path in there}
    for process in processes:
        if process not in names:
            raise InvalidArgument(
                f"{run_dir} has no log of {process!r}; it has those of {', '.join(names)}"
            )
    return [path for name, path in names.items() if not processes or name in processes]


def _show(logs: Sequence[Log], last: bool = False) -> bool:
    """Prints the lines since the last call; returns whether there were any."""
    width = max(len(log.name) for log in logs)
    said = False
    for name, line in merged(logs, last):
        # Lines contain the output of user code and text from peers.
        sys.stdout.write(f"{sanitize(name):{width}} | {sanitize_lines(line, LONGEST)}\n")
        said = True
    sys.stdout.flush()
    return said
