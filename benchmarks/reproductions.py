"""Runs what docs/reproductions.md reports, and prints it as rows of Markdown.

    python benchmarks/reproductions.py sigmoid | dnn | softmax | early | peers PEER_SCRIPT

Each row is one whole `coordinator up` (or one `benchmarks/single_process.py`) on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SEEDS = (0, 1, 2)


def up(job: str, *args: str) -> dict[str, Any]:
    """Trains an example on a cluster; its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        job_path = str(EXAMPLES / f"{job}.py")
        command = [sys.executable, "-m", "coordinator.cli", "up", job_path, *args]
        done = subprocess.run(
            [*command, "--run-dir", str(run_dir)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        if done.returncode:
            summary["eval"] = {"accuracy": float("nan")}
        return summary


def alone(job: str, *args: str) -> dict[str, Any]:
    """Trains an example in one process."""
    command = [sys.executable, "benchmarks/single_process.py", str(EXAMPLES / f"{job}.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def early() -> None:
    """Early stopping with patience 6, the best epoch restored: one process, async, sync."""
    say("run", "test accuracy by seed", "epochs", "best epoch", "seconds of training")
    stop = {"epochs": 20, "stop_early": "max:accuracy patience=6 restore_best=true"}
    cluster = ("--shards", "2", "--workers", "2")
    for name, args in (
        ("one process", None),
        (
            "async, 2 workers, lr 0.003",
            ("--mode", "async", *sets(**{"optimizer.learning_rate": 0.003})),
        ),
        ("sync, 2 workers, 3 replicas", ()),
    ):
        runs = [
            alone("mnist_dnn", *sets(**stop, seed=seed))
            if args is None
            else up("mnist_dnn", *cluster, *args, *sets(**stop, seed=seed))
            for seed in SEEDS
        ]
        say(
            name,
            ", ".join(
                f"{(run.get('best') or {}).get('accuracy', run['eval']['accuracy']):.4f}"
                for run in runs
            ),
            ", ".join(
                str(len(run["history"]) if "history" in run else run["steps"] // 1200)
                for run in runs
            ),
            ", ".join(str((run.get("best") or {}).get("epoch", "-")) for run in runs),
            ", ".join(f"{run['train_s']:.0f}" for run in runs),
        )


def say(*cells: object) -> None:
    sys.stdout.write("| " + " | ".join(map(str, cells)) + " |\n")
    sys.stdout.flush()


def sets(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def sigmoid() -> None:
    """Asynchronous workers, one shard, 20 epochs per worker, three seeds."""
    say("workers", "epochs", "test accuracy by seed", "mean", "seconds of training", "steps/s")
    for workers in (1, 2, 3):
        epochs = 20 * workers
        runs = [
            up(
                "mnist_sigmoid",
                *("--shards", "1", "--workers", str(workers)),
                *sets(epochs=epochs, seed=seed),
            )
            for seed in SEEDS
        ]
        found = [run["eval"]["accuracy"] for run in runs]
        say(
            workers,
            epochs,
            ", ".join(f"{accuracy:.3f}" for accuracy in found),
            f"{statistics.mean(found):.3f}",
            ", ".join(f"{run['train_s']:.0f}" for run in runs),
            ", ".join(f"{run['steps_per_s']:.0f}" for run in runs),
        )


def row(name: str, run: dict[str, Any]) -> None:
    accuracy = run["eval"]["accuracy"]
    steps = run.get("global_step", run.get("steps"))
    say(name, f"{accuracy:.4f}", steps, f"{run['train_s']:.0f}", run.get("reason", ""))


def dnn() -> None:
    """Five layers with a cosine schedule over 15 epochs."""
    say("run", "test accuracy", "updates", "seconds of training", "reason if stopped")
    cluster = ("--shards", "2", "--workers", "3")
    row("one process, lr 0.01", alone("mnist_dnn", *sets(epochs=15)))
    row("sync, 3 workers, lr 0.01", up("mnist_dnn", *cluster, *sets(epochs=15)))
    slow = {"optimizer.learning_rate": 0.003}
    asynchronous = (*cluster, "--mode", "async")
    row("async, 3 workers, lr 0.003", up("mnist_dnn", *asynchronous, *sets(epochs=15, **slow)))
    row("async, 3 workers, lr 0.01", up("mnist_dnn", *asynchronous, *sets(epochs=15)))


def softmax() -> None:
    """Softmax regression, 50 epochs."""
    say("run", "test accuracy", "updates", "seconds of training", "reason if stopped")
    cluster = ("--shards", "2", "--workers", "3", *sets(epochs=50))
    row("one process", alone("mnist_softmax", *sets(epochs=50)))
    row("async, 3 workers", up("mnist_softmax", *cluster, "--mode", "async"))
    row("sync, 3 workers", up("mnist_softmax", *cluster, "--mode", "sync", *sets(replicas=3)))


def peers(script: str) -> None:
    """Steps per second of all workers, beside TensorFlow's own strategy, turn by turn."""
    say("workload", "ours", "TensorFlow", "ratio")
    for turn in range(2):
        for job, workload, epochs in (
            ("mnist_sigmoid", "mnist_sigmoid_3w", 10),
            ("mnist_dnn", "mnist_dnn_3w", 3),
        ):
            args = ("--shards", "1", "--workers", "3", "--mode", "async")
            slow = sets(**{"optimizer.learning_rate": 0.001})
            ours = up(job, *args, *sets(epochs=epochs), *slow)["steps_per_s"]
            done = subprocess.run(
                [sys.executable, script, workload], capture_output=True, text=True, check=True
            )
            theirs = json.loads(done.stdout.splitlines()[-1])["steps_per_s"]
            say(f"{workload}, turn {turn + 1}", ours, theirs, f"{ours / theirs:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[], None]] = {
        "sigmoid": sigmoid,
        "dnn": dnn,
        "softmax": softmax,
        "early": early,
    }
    parser.add_argument("part", choices=[*parts, "peers"])
    parser.add_argument("script", nargs="?", help="peers: the script that runs TensorFlow's")
    args = parser.parse_args(argv)
    if args.part == "peers":
        if args.script is None:
            parser.error("peers needs the path of the peer's script")
        peers(args.script)
    else:
        parts[args.part]()


if __name__ == "__main__":
    main()
