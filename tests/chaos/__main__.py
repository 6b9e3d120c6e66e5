"""``python -m tests.chaos``: runs schedules of faults against real processes.

Prints a line for each schedule that fails, with the command that runs it again, and what all of
them came to. The exit status is 0 when every one has passed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

# Before gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ["GRPC_VERBOSITY"] = "NONE"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from tests.chaos.schedule import Schedule, make_schedule
from tests.chaos.trial import TOO_LATE, Result, run_schedule
from tests.chaos.witness import Options

TICK_S = 0.05

RECOVERY_S = 2.0
"""From the start of a shard to the first new step: what is to be expected of a quiet machine."""

SHOWN = 12
"""Lines of what is wrong with a schedule."""


def main() -> int:
    """The exit status."""
    options = _parse()
    signal.signal(signal.SIGTERM, _leave)
    disk = can_mount()
    if not disk:
        say("no disk is filled up: mounting a file system needs root")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    schedules = choose_schedules(options, disk)
    references = make_references(schedules, folder)
    results = []
    for schedule, result in run_all(schedules, references, options.jobs, folder):
        results.append(result)
        if result.wrong:
            show_failure(schedule, result, folder / str(result.seed))
        elif options.verbose:
            say(f"seed {result.seed} passed in {result.seconds:.1f} s: {schedule}")
        if not result.wrong and not options.keep:
            shutil.rmtree(folder / str(result.seed), ignore_errors=True)
    failed = [result.seed for result in results if result.wrong]
    say(summary(results, time.monotonic() - began))
    say(f"{sum(s.options.rows for s in schedules)} of the jobs have embedding tables")
    several = [s.options for s in schedules if s.options.devices > 1]
    say(
        f"{len(several)} have workers of several devices, of which "
        f"{sum(one.sums for one in several)} push sums"
    )
    say(f"{sum(not s.options.exact for s in schedules)} have workers that push sums of a round")
    if not failed and not options.keep:
        shutil.rmtree(folder)
    return 1 if failed else 0


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _leave(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="side by side")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep everybody's logs there")
    parser.add_argument("--tensorflow", action="store_true", help="with TensorFlow workers")
    parser.add_argument("--allreduce", action="store_true", help="workers host the shards")
    parser.add_argument(
        "--devices",
        action="store_true",
        help="only seeds whose workers have several devices, N of them",
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each that passes, too")
    options = parser.parse_args()
    if options.devices and (options.tensorflow or options.allreduce):
        parser.error("--devices: no such schedules with --tensorflow or --allreduce")
    return options


def choose_schedules(options: argparse.Namespace, disk: bool) -> list[Schedule]:
    """The schedules that were asked for. A seed means the same with ``--devices`` as without."""
    made = (
        make_schedule(seed, disk=disk, tensorflow=options.tensorflow, hosted=options.allreduce)
        for seed in itertools.count(options.first)
    )
    if options.devices:
        made = (schedule for schedule in made if schedule.options.devices > 1)
    return list(itertools.islice(made, options.schedules))


def can_mount() -> bool:
    """Whether a file system can be mounted here, so that it can be filled up."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "chaos", folder],
            capture_output=True,
            check=False,
        )
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return mounted.returncode == 0


def make_references(schedules: Sequence[Schedule], folder: Path) -> dict[Options, Path]:
    """Trains synchronous jobs with TensorFlow without faults and returns their last checkpoints.
    The witness model needs none."""
    kinds = [s.options for s in schedules if s.options.tensorflow and s.options.policy.rounds]
    found = {}
    for number, options in enumerate(dict.fromkeys(map(without_workers, kinds))):
        calm = Schedule(-1 - number, options, ())
        ((_, result),) = run_all([calm], {}, 1, folder)
        if result.wrong:
            raise SystemExit(f"a job without faults failed: {result.wrong}")
        checkpoints = folder / str(calm.seed) / "run" / "checkpoints"
        found[options] = max(checkpoints.glob("step-*"))
    return found


def without_workers(options: Options) -> Options:
    """The options on which the result of a synchronous job depends."""
    return replace(options, workers=1, shm=True, data=False)


def run_all(
    schedules: Sequence[Schedule], references: Mapping[Options, Path], jobs: int, folder: Path
) -> Iterator[tuple[Schedule, Result]]:
    """Each schedule in a process of its own, ``jobs`` side by side; in the order of their ends."""
    running: dict[Schedule, BaseProcess] = {}
    try:
        yield from _run_all(schedules, references, jobs, folder, running)
    finally:
        # After an interrupt they still have file systems to take down.
        for process in running.values():
            process.terminate()
            process.join()


def _run_all(
    schedules: Sequence[Schedule],
    references: Mapping[Options, Path],
    jobs: int,
    folder: Path,
    running: dict[Schedule, BaseProcess],
) -> Iterator[tuple[Schedule, Result]]:
    context = get_context("fork")
    waiting = list(reversed(schedules))
    while running or waiting:
        while waiting and len(running) < jobs:
            schedule = waiting.pop()
            reference = references.get(without_workers(schedule.options))
            running[schedule] = context.Process(target=_run_one, args=(schedule, reference, folder))
            running[schedule].start()
        for schedule, process in list(running.items()):
            process.join(TICK_S / len(running))
            if process.exitcode is None:
                continue
            del running[schedule]
            path = folder / f"{schedule.seed}.json"
            if path.exists():
                yield schedule, Result.read(path)
                path.unlink()
            else:
                wrong = f"the harness itself ended with {process.exitcode}"
                yield schedule, Result(schedule.seed, [wrong])


def _run_one(schedule: Schedule, reference: Path | None, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    root = folder / str(schedule.seed)
    shutil.rmtree(root, ignore_errors=True)
    run_schedule(schedule, root, reference).write(folder / f"{schedule.seed}.json")


def show_failure(schedule: Schedule, result: Result, folder: Path) -> None:
    """All that is needed to find out why."""
    say(f"\nseed {result.seed} FAILED after {result.seconds:.1f} s")
    say(f"  {schedule.options}")
    for fault in result.faults:
        say(f"  {fault}")
    for line in result.wrong[:SHOWN]:
        say(f"  wrong: {line}")
    if len(result.wrong) > SHOWN:
        say(f"  and {len(result.wrong) - SHOWN} more")
    say(f"  logs: {folder}")
    flag = " --tensorflow" if schedule.options.tensorflow else ""
    flag = " --allreduce" if schedule.options.hosted else flag
    say(f"  again: {sys.executable} -m tests.chaos --schedules 1 --first {result.seed}{flag}")


def summary(results: Sequence[Result], seconds: float) -> str:
    """Sums up the results of all schedules."""
    passed = sum(not result.wrong for result in results)
    all_faults = [fault for result in results for fault in result.faults]
    kinds = Counter(f.split()[0] for f in all_faults if not f.endswith(TOO_LATE))
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    lines = [
        f"{passed} of {len(results)} schedules passed in {seconds:.0f} s"
        f" ({sum(r.cpu_s for r in results) / max(1, len(results)):.1f} CPU seconds each)",
        f"{kinds.total()} faults: {counted}; {len(all_faults) - kinds.total()} came too late;"
        f" the policy was changed in {sum(r.changed for r in results)} schedules",
    ]
    failed = [str(result.seed) for result in results if result.wrong]
    if failed:
        lines.append(f"failed: {' '.join(failed)}")
    else:
        # The rule of three.
        bound = min(1.0, 3 / max(1, len(results)))
        lines.append(f"at 95 % confidence fewer than {bound:.2%} of such schedules fail")
    times = sorted(time for result in results for time in result.recoveries)
    if times:
        soon = sum(time <= RECOVERY_S for time in times)
        lines.append(
            f"first new step after a shard was up again: median {times[len(times) // 2]:.2f} s,"
            f" 90 % within {times[int(len(times) * 0.9)]:.2f} s, at most {times[-1]:.2f} s;"
            f" {soon} of {len(times)} within {RECOVERY_S:g} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
