"""How much training gets done while something is killed every few seconds.

Trains MNIST asynchronously with ``coordinator up`` twice for the same time: left alone, and with a
SIGKILL to a random process of the cluster every ten seconds. Prints the goodput: useful global
steps, those that are in the parameters at the end, against those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.report import say, write_json
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.options.locate import security_of_run

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "mnist_dnn.py"

TARGET = 0.7

SETTINGS = (
    "epochs=100000",
    "engine=numpy",
    "checkpoint_every=500",
    # Stale gradients act like more momentum.
    "optimizer.learning_rate=0.003",
)

FIRST_STEP_S = 120.0
STOP_S = 60.0
TICK_S = 0.1
ROLES = ("coordinator.cli", "pserver.cli", "worker.cli")


@dataclass
class Soak:
    """Result of one run.

    Attributes:
        steps: useful ones, from the first that was seen to the end of the time.
        kills: by role.
        generation: at the end; each loss of a shard or of the coordinator raises it.
        back: steps that losses took back in all.
    """

    seconds: float
    steps: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    generation: int = 0
    back: int = 0


class SoakFailed(Exception):
    """A run ended, or never began; the text says why."""


def main() -> int:
    """The exit status: 0 where the goodput is what it should be, 1 where it is not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run; default: 10")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="a kill each")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of who is killed")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    options = parser.parse_args()
    seconds = options.minutes * 60
    try:
        alone = soak(seconds, options.shards, options.workers)
        say(f"left alone: {alone.steps} steps in {seconds:.0f} s")
        rng = random.Random(options.seed)
        faulted = soak(seconds, options.shards, options.workers, options.every, rng)
    except SoakFailed as error:
        say(f"error: {error}")
        return 1
    goodput = faulted.steps / max(1, alone.steps)
    kills = ", ".join(f"{count} {role}" for role, count in sorted(faulted.kills.items()))
    sys.stdout.write(
        f"{faulted.steps} useful steps with a kill every {options.every:g} s ({kills}),"
        f" {alone.steps} without: goodput {goodput:.2f}, target {TARGET}\n"
        f"generations: {faulted.generation}; steps that losses took back: {faulted.back}\n"
    )
    if options.json:
        runs = {"alone": asdict(alone), "faulted": asdict(faulted)}
        write_json(options.json, {"goodput": goodput, **runs})
    return 0 if goodput >= TARGET else 1


def soak(
    seconds: float,
    shards: int,
    workers: int,
    every_s: float | None = None,
    rng: random.Random | None = None,
) -> Soak:
    """Trains for ``seconds`` after the first step; kills a process every ``every_s``.

    Raises:
        SoakFailed: the job ended, or did not begin.
    """
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "coordinator.cli", "up", str(JOB), "--mode", "async"]
        command += ["--shards", str(shards), "--workers", str(workers), "--gpu", "none"]
        command += ["--run-dir", str(run_dir), "--max-restarts", "1000000"]
        command += [word for setting in SETTINGS for word in ("--set", setting)]
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
            try:
                return _watch(process, run_dir, seconds, every_s, rng or random.Random(0))
            except SoakFailed as error:
                output.seek(0)
                said = output.read().strip().splitlines()[-10:]
                raise SoakFailed("\n".join([str(error), *said])) from None
            finally:
                _stop(process)


def _watch(
    process: subprocess.Popen[bytes],
    run_dir: Path,
    seconds: float,
    every_s: float | None,
    rng: random.Random,
) -> Soak:
    found = Soak(seconds)
    look = _Look(run_dir)
    began = time.monotonic()
    while not look.steps():
        if time.monotonic() - began > FIRST_STEP_S or process.poll() is not None:
            raise SoakFailed("the job did not begin to train")
        time.sleep(TICK_S)
    began = time.monotonic()
    first = last = look.steps()
    killed = 0
    while (passed := time.monotonic() - began) < seconds:
        if process.poll() is not None:
            raise SoakFailed(f"the job ended by itself after {passed:.0f} s")
        now = look.steps()
        found.back += max(0, last - now)
        last = now
        if every_s is not None and passed >= every_s * (killed + 1) and passed < seconds - every_s:
            killed += 1
            role = _kill_one(process.pid, rng)
            if role:
                found.kills[role] += 1
                say(f"{passed:.0f} s: step {now}, generation {look.generation}, killed a {role}")
        time.sleep(TICK_S)
    found.steps = look.steps() - first
    found.generation = look.generation
    look.close()
    return found


class _Look:
    """The job's status, as often as it can be had; the last one while the coordinator is away."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "address"
        self._client: CoordinatorClient | None = None
        self._steps = 0
        self.generation = 0

    def steps(self) -> int:
        """The global step."""
        with suppress(OSError):
            address = self._file.read_text().strip()
            if address and (self._client is None or self._client.address != address):
                self.close()
                self._client = CoordinatorClient(address, security_of_run(self._file.parent))
        if self._client is not None:
            with suppress(PsError):
                status = self._client.get_job_status()
                if status.phase == "training":
                    self._steps, self.generation = status.global_step, status.generation
        return self._steps

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()
        self._client = None


def _kill_one(parent: int, rng: random.Random) -> str:
    """Kills one of the processes that ``coordinator up`` has started; its role."""
    found = sorted(_children(parent))
    if not found:
        return ""
    pid, role = rng.choice(found)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return role.partition(".")[0]


def _children(parent: int) -> list[tuple[int, str]]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            # Of a fork the whole line is one word.
            line = (proc / "cmdline").read_bytes().decode().replace("\0", " ").split()
            of = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            role = next((role for role in ROLES if role in line), "")
            if of == parent and role:
                found.append((int(proc.name), role))
    return found


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children go when it goes
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
