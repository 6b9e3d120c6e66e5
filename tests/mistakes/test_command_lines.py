"""Mistakes in what was typed, of every command."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import JOBS, ROOT
from tests.mistakes.commands import say

MISTAKES = {
    "a command that there is not": ("coordinator statsu", "did you mean 'status'?"),
    "an option that there is not": ("coordinator status --jsno", "did you mean '--json'?"),
    "an option of another command": ("worker run --shards=3", "unrecognized arguments: --shards=3"),
    "text where a number is expected": (
        "pserver serve --shard first",
        "argument --shard: invalid int value: 'first'",
    ),
    "a directory after --resume": (
        "coordinator up job.py --resume runs/one",
        "unrecognized arguments: runs/one; --resume takes no value: --run-dir runs/one --resume",
    ),
    "one word too many": ("coordinator status now", "unrecognized arguments: now"),
    "a setting of the job as an option": (
        "coordinator up job.py --epochs 3",
        "unrecognized arguments: --epochs; use --set epochs=3",
    ),
    "a setting as an option, before the job file": (
        "coordinator up --batch-size 32 job.py",
        "use --set batch_size=32",
    ),
    "a setting as an option of serve": (
        "coordinator serve --job job.py --checkpoint-every=5",
        "unrecognized arguments: --checkpoint-every=5; use --set checkpoint_every=5",
    ),
    "an argument of the optimizer as an option": (
        "worker describe job.py --lr 0.1",
        "use --set optimizer.learning_rate=0.1",
    ),
    "a misspelt setting as an option": ("coordinator up job.py --epoch 3", "use --set epochs=3"),
    "a job file's own setting as an option": (
        f"coordinator up {ROOT / 'examples' / 'criteo_deepfm.py'} --eval-rows 8",
        "use --set eval_rows=8",
    ),
    "no job file": ("coordinator up", "the following arguments are required: JOB"),
    "an action that there is not": ("coordinator checkpoint verfy x", "did you mean 'verify'?"),
    "a URL for the run directory": (
        "coordinator up job.py --run-dir s3://bucket/run",
        "'s3://bucket/run' is a URL; expected a path: runs lie on a POSIX file system",
    ),
    "one choice too many": (
        "worker describe job.py --mode asynch",
        "did you mean 'async'?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_cause_and_what_to_do(mistake: str, capfd: pytest.CaptureFixture[str]) -> None:
    typed, fix = MISTAKES[mistake]
    said = say(capfd, *typed.split())
    assert (said.code, said.status) == ("PS113", 2), said.everything
    assert fix in said.message
    assert said.everything.startswith("usage: ")
    assert said.everything.count("\n") <= 6
    assert "Traceback" not in said.everything


@pytest.mark.parametrize(
    "typed",
    [
        f"coordinator up {JOBS / 'dense.py'}",
        "coordinator status",
        "coordinator set mode=async",
        "coordinator dashboard",
        "coordinator doctor",
        "coordinator healthcheck",
        "pserver lookup users 1",
        "pserver healthcheck",
        "worker healthcheck 192.0.2.1:9090",
    ],
    ids=lambda typed: f"a misspelt variable, {' '.join(typed.split()[:2])}",
)
def test_a_variable_that_there_is_not(
    typed: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of every command that reads some; what is meant by it may be how to be secure."""
    monkeypatch.setenv("PSERVER_CERT", "certs")
    said = say(capfd, *typed.split())
    assert (said.code, said.status) == ("PS110", 2), said.everything
    assert said.message.startswith("PSERVER_CERT is set and is not a setting; unset it; did you ")
    assert said.message.endswith("mean 'PSERVER_CERTS'?")
