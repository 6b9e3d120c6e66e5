"""``coordinator up JOB``: runs a whole cluster on this machine for one job."""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

from rich.console import Console

from coordinator.certificates.authority import RENEW_BEFORE, certificates_of_run
from coordinator.certificates.members import member_of_run
from coordinator.display.screen import Screen, open_screen
from coordinator.launch.commands import UpOptions, cluster, letters, reserved_address, with_metrics
from coordinator.launch.conclusion import Earlier, conclude, print_error, say_refused
from coordinator.launch.fleet import stamp
from coordinator.launch.options import ANYWHERE, LocalArguments, UpArguments
from coordinator.launch.supervisor import Supervisor
from coordinator.launch.warm_start import ForkSource, WarmStart
from coordinator.membership.membership import MAX_ACTIVE
from coordinator.process.resume_checks import check_ledger
from coordinator.records.run_directory import (
    check_free,
    check_holds_run,
    new_run_directory,
    newest_run_directory,
)
from psrpc.core.errors import (
    InvalidArgument,
    PsError,
    disk_code,
    disk_reason,
    error_line,
)
from psrpc.core.names import CERTS, SUMMARY
from psrpc.core.tensor_form import MAX_SHARDS
from psrpc.files.durable import ensure_directory, make_directory
from psrpc.files.run_paths import read_summary, unfinished_run
from psrpc.ops.exit_status import INTERRUPTED
from psrpc.ops.process import available_nbytes, on_stop_signals
from psrpc.options.declaration import options_of
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look
from psrpc.options.security_options import from_arguments, is_insecure
from psrpc.security.certificates import CA_KEY
from psrpc.security.credentials import Security
from psrpc.security.identity import Role, job_name

STDIN = 0
"""File descriptor of standard input."""

WORKER_NBYTES = 250 << 20
"""Memory of a worker before it loads data or a model; TensorFlow takes it."""

SHARD_NBYTES = 75 << 20
"""Memory of a shard without parameters and without TensorFlow."""

WORKERS_PER_CORE = 4
"""More workers per core cause a warning. This many may be intended, to try out a cluster."""


def check_counts(shards: int, workers: int) -> None:
    """Raises InvalidArgument for more shards or workers than a job can have."""
    for flag, count, most in (("shards", shards, MAX_SHARDS), ("workers", workers, MAX_ACTIVE)):
        if count > most:
            raise InvalidArgument(f"--{flag} is {count}; a job has {most} at most")


def crowded(shards: int, workers: int, cores: int, free_nbytes: int) -> list[str]:
    """Returns warnings about too many processes; none if the machine has room.

    Args:
        cores: cores that processes may use.
        free_nbytes: available memory.
    """
    found = []
    needed = workers * WORKER_NBYTES + shards * SHARD_NBYTES
    if needed > free_nbytes:
        found.append(
            f"--workers {workers} and --shards {shards} take {needed / 1e9:.1f} GB of memory at "
            f"least, and {free_nbytes / 1e9:.1f} GB are free; say fewer, or processes will be "
            "killed"
        )
    if workers > WORKERS_PER_CORE * cores:
        found.append(
            f"--workers {workers} share {cores} {'core' if cores == 1 else 'cores'}: more workers "
            "than cores train no faster, and each start takes seconds of one"
        )
    return found


OWN_CERTIFICATES = 64
"""Number of workers that get a certificate of their own, which takes 2 ms; the others share one."""


def run(args: argparse.Namespace, warm_start: WarmStart | None = None) -> int:
    """Runs the job; returns 0 done, 1 failed, 2 bad input, 130 interrupted.

    Args:
        warm_start: a fork server that is started already; None starts all processes fresh.
    """
    try:
        _check(args)
        asked = from_arguments(Role.OPERATOR, args)
        made, run_dir = make_run_directory(args)
        security = run_credentials(asked, args.job, run_dir, args.workers)
        options = _options(args, run_dir, security)
    except PsError as error:
        if isinstance(error, UserCodeFailed):
            print_error(error.user_traceback.rstrip())
        print_error(error_line(error))
        return 2
    earlier = Earlier(stamp(run_dir / SUMMARY), read_summary(run_dir))
    screen = open_screen(Console())
    try:
        with ExitStack() as held:
            options = held.enter_context(reserved_dashboard(options))
            cores = os.cpu_count() or 1
            supervisor = held.enter_context(supervised(options, screen, warm_start, cores))
            on_stop_signals(lambda _number: supervisor.stop())
            alone = stop_at_end_of_input(supervisor) if options.attended else Event()
            screen.note(f"run directory {run_dir}")
            for line in crowded(options.shards, options.workers, cores, available_nbytes()):
                screen.note(f"warning: {line}")
            left = None if args.run_dir or args.resume else unfinished_run(Path(args.job).stem)
            if left is not None:
                screen.note(f"{left} has not ended; --run-dir {left} goes on with that run")
            if options.dashboard is not None:
                screen.note(f"dashboard http://{options.dashboard}/")
            outcome = supervisor.run()
            if alone.is_set() and outcome.exit_status == INTERRUPTED:
                print_error(f"the attendant of {run_dir} is gone: standard input has ended")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say_refused(f"cannot start the processes of the job: {where}", error, run_dir)
        return 2
    except PsError as error:
        # The certificates of hosts, see `coordinator.launch.hosts`.
        print_error(error_line(error))
        return 2
    return conclude(outcome, options, earlier, made)


@contextmanager
def supervised(
    options: UpOptions, screen: Screen, warm_start: ForkSource | None, cores: int
) -> Iterator[Supervisor]:
    """Yields the supervisor of a cluster, whose addresses are reserved within the block.

    Args:
        cores: cores that its workers share.

    Raises:
        OSError: there is no port left, or the run directory cannot be written to.
    """
    with ExitStack() as held:
        address = held.enter_context(reserved_address())
        processes = cluster(options, os.environ, cores, address)
        name, run_dir = Path(options.job).stem, options.run_dir
        processes = held.enter_context(with_metrics(processes, name, run_dir))
        yield Supervisor(processes, run_dir, screen, options.max_restarts, warm_start)


def _check(args: argparse.Namespace) -> None:
    """Refuses invalid options before anything is made, touched or started."""
    check_local(args)
    if args.dashboard not in (None, ANYWHERE):
        # Only here: the web server takes long to import.
        from coordinator.dashboard.server import check_address

        check_address(args.dashboard, is_insecure(args))
    first_look(Path(args.job), args.overrides)
    if args.run_dir is not None:
        if args.resume:
            check_holds_run(args.run_dir)
        check_free(args.run_dir)
        check_ledger(args.run_dir, resume=args.resume)


def check_local(args: argparse.Namespace | LocalArguments) -> None:
    """Raises InvalidArgument for options of a local cluster that are out of range."""
    for name in ("shards", "workers", "replicas", "intra_op_threads"):
        value, least = getattr(args, name), 0 if name == "shards" else 1
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise InvalidArgument(
                f"--{flag} is {value}; expected a whole number of at least {least}"
            )
    check_counts(args.shards, args.workers)
    if args.max_restarts < 0:
        raise InvalidArgument(
            f"--max-restarts is {args.max_restarts}; expected a whole number of at least 0"
        )
    if not 1 <= args.slow_down < math.inf:
        raise InvalidArgument(f"--slow-down is {args.slow_down:g}; expected a number of at least 1")
    if not args.connect_timeout_s > 0:
        raise InvalidArgument(
            f"--connect-timeout is {args.connect_timeout_s:g}; expected seconds above 0"
        )


def run_credentials(asked: Security, job: str, run_dir: Path, workers: int) -> Security:
    """Returns the requested credentials, or certificates that this run makes for itself. Each
    worker, which runs the job's code, has its own in a directory without the authority's key.

    Raises:
        InvalidArgument: certificates of an earlier start are unusable.
    """
    certs = run_dir.absolute() / CERTS
    elsewhere = asked.directory is not None and asked.directory.absolute() != certs
    if elsewhere or asked.insecure or asked.by_token:
        return asked
    now = datetime.now(UTC)
    certificates_of_run(certs, job_name(Path(job).stem), now)
    # Without the authority's key, which may be kept elsewhere, the workers share a certificate.
    own = min(workers, OWN_CERTIFICATES) if (certs / CA_KEY).exists() else 0
    for worker in range(own):
        member_of_run(certs, Role.WORKER, letters(worker), now, RENEW_BEFORE)
    return Security.from_options(Role.OPERATOR, certs)


def _options(args: argparse.Namespace, run_dir: Path, security: Security) -> UpOptions:
    said = {each.name: getattr(args, each.name) for each in options_of(UpArguments)}
    found = {"run_dir": run_dir, "overrides": tuple(args.overrides)}
    return UpOptions(
        args.job,
        **(said | found),
        run_dir_given=args.run_dir is not None,
        dashboard=args.dashboard,
        security=security,
    )


def stop_at_end_of_input(supervisor: Supervisor) -> Event:
    """Stops all processes at once when standard input ends; returns an event that is set then."""
    ended = Event()

    def read() -> None:
        with suppress(OSError):
            while os.read(STDIN, 1 << 12):
                pass
        ended.set()
        for _ in range(2):
            supervisor.stop()

    Thread(target=read, name="attendant", daemon=True).start()
    return ended


@contextmanager
def reserved_dashboard(options: UpOptions) -> Iterator[UpOptions]:
    """Yields ``options``; a dashboard on any free port gets a reserved one within the block."""
    if options.dashboard != ANYWHERE:
        yield options
        return
    with reserved_address() as address:
        yield replace(options, dashboard=address)


def make_run_directory(args: argparse.Namespace) -> tuple[bool, Path]:
    """Returns whether the run directory is new, and its path."""
    name = Path(args.job).stem
    if args.run_dir is not None:
        made = not args.run_dir.exists()
        try:
            ensure_directory(args.run_dir.absolute())
        except OSError as error:
            raise InvalidArgument(
                f"cannot make --run-dir {args.run_dir}: {disk_reason(error)}", code=disk_code(error)
            ) from None
        return made, args.run_dir
    if args.resume:
        newest = newest_run_directory(name)
        check_free(newest)
        return False, newest
    first = new_run_directory(name, datetime.now(UTC))
    for attempt in itertools.count(1):
        # Two runs may begin in the same second.
        path = first if attempt == 1 else first.with_name(f"{first.name}-{attempt}")
        try:
            make_directory(path.absolute())
        except FileExistsError:
            continue
        except OSError as error:
            raise InvalidArgument(
                f"cannot make {path}: {disk_reason(error)}; say --run-dir", code=disk_code(error)
            ) from None
        return True, path
    raise AssertionError("count never ends")
