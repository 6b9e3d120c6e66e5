"""Launchers from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pserver
from coordinator.launchers.early_checks import plan_to_launch
from coordinator.launchers.launch import plan_from
from coordinator.launchers.plan import ClusterOptions
from psrpc.core.errors import PsError
from tests.e2e.cluster import EXAMPLES

JOB = EXAMPLES / "mnist_dnn.py"


def test_options_of_python_are_those_of_the_command(tmp_path: Path) -> None:
    plan = plan_from(
        str(JOB), str(tmp_path), {"workers": 3, "insecure": True, "overrides": ["seed=1"]}
    )
    assert plan.tasks == 5
    assert plan.coordinator[-3:] == ["--set", "seed=1", "--insecure"]


def test_paths_mean_the_same_in_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.crt").touch()
    monkeypatch.chdir(tmp_path)
    plan = plan_from(str(JOB), "run", {"certs": ".", "token_file": "token"})
    monkeypatch.chdir("/")
    for arguments in (plan.coordinator, plan.shard, plan.worker):
        assert arguments[-4:] == ["--certs", str(tmp_path), "--token-file", f"{tmp_path}/token"]


OPEN = {"insecure": True, "mode": "sync"}
HOSTED = {"shards": 0, "overrides": ["dense=allreduce"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 3}, "a cluster has no option 'worker'; did you mean 'workers'?"),
        ({"workers": 0}, "workers is 0; expected a whole number"),
        ({"workers": "many"}, "workers is 'many'; expected a whole number"),
        ({"mode": "fast"}, "mode is 'fast'; expected async or sync or ssp"),
        ({"gpu": "first"}, "gpu is 'first'; expected a text (auto|none|all|I,J)"),
        ({"overrides": ["seed"]}, "--set seed: expected key=value"),
        ({"overrides": ["sed=1"]}, "--set sed=1: there is no sed; did you mean seed?"),
        ({"overrides": ["epochs=many"]}, "--set epochs=many: 'many' cannot be read; expected a wh"),
        ({"overrides": "seed=1"}, "overrides is 'seed=1'; expected a list of texts"),
        ({"shards": -1}, "shards is -1; expected a whole number"),
        ({}, "a cluster on several machines needs --certs DIR"),
        (
            {**OPEN, "shards": 0},
            "--shards is 0, and the parameters need a shard; say --shards 1, or",
        ),
        (
            {**OPEN, **HOSTED, "shards": 1},
            "dense is 'allreduce', so workers host the parameters and",
        ),
        (
            {**OPEN, **HOSTED, "mode": "async"},
            "dense is 'allreduce', which is for mode sync, but mo",
        ),
        (
            {**OPEN, "shards": 0, "workers": 2, "overrides": ["dense=allreduce", "slices=3"]},
            "dense is 'allreduce' with 3 slices of the parameters (slices), and 2 workers to host",
        ),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_submitted(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PsError) as refused:
        pserver.launch.slurm(JOB, run_dir=tmp_path / "run", **options)
    assert str(refused.value).startswith(message)
    assert not (tmp_path / "run").exists()


SYNC = "from pserver import Job\njob = Job(mode='sync', replicas=2, {})\n"


@pytest.mark.parametrize(
    ("source", "shards", "refused"),
    [
        (SYNC.format("dense='allreduce'"), 1, "start workers alone (launchers: --shards 0)"),
        (SYNC.format("dense='allreduce', slices=2"), 0, "and 1 worker to host them, one each"),
        (SYNC.format("dense='allreduce'"), 0, ""),
        ("from pserver import Embedding\n" + SYNC.format("dense='allreduce'"), 1, ""),
        ("import pickle as p\n" + SYNC.format("dense='allreduce'"), 1, ""),
        ("import mine_elsewhere\n" + SYNC.format("dense='allreduce'"), 1, ""),
        (SYNC.format("dense='allreduce', slices=NUMBER"), 0, ""),
        (SYNC.format(""), 0, "the parameters need a shard"),
        (SYNC.format("dense=WAY"), 0, ""),
        (SYNC.format("**more"), 0, ""),
        (SYNC.replace("pserver", "mine").format(""), 0, ""),
        (SYNC.format("") + "job = other(job)", 0, ""),
    ],
)
def test_what_a_job_file_leaves_open_is_not_refused(
    tmp_path: Path, source: str, shards: int, refused: str
) -> None:
    """A job file says what it is for by literals alone; models may come from elsewhere."""
    job = tmp_path / "job.py"
    job.write_text(source)
    asked = ClusterOptions(run_dir=tmp_path / "run", shards=shards, insecure=True)
    if not refused:
        assert plan_to_launch(job, asked).job == job
        return
    with pytest.raises(PsError) as raised:
        plan_to_launch(job, asked)
    assert refused in str(raised.value)


def test_of_a_job_file_in_an_image_only_the_options_are_known(tmp_path: Path) -> None:
    asked = ClusterOptions(run_dir=tmp_path, shards=0, insecure=True)
    job = Path("/job.py")
    assert plan_to_launch(job, asked, elsewhere=True).job == job
    hosted = replace(asked, shards=1, overrides=("dense=allreduce",))
    assert plan_to_launch(job, hosted, elsewhere=True).job == job
    with pytest.raises(PsError, match="dense is 'allreduce', which is for mode sync"):
        plan_to_launch(job, replace(hosted, mode="async"), elsewhere=True)
    with pytest.raises(PsError, match="the parameters need a shard"):
        plan_to_launch(job, replace(asked, overrides=("dense=shards",)), elsewhere=True)
