"""Launchers from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pserver
from coordinator.launchers.launch import plan_from
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
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_submitted(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PsError) as refused:
        pserver.launch.slurm(JOB, run_dir=tmp_path / "run", **options)
    assert str(refused.value).startswith(message)
    assert not (tmp_path / "run").exists()
