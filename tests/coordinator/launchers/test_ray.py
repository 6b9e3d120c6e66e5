"""Places of a cluster in Ray, and the checks before anything is started; no Ray runs here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.__main__ import main
from coordinator.launchers import launch
from coordinator.launchers.ray import check_answers
from coordinator.launchers.ray_plan import check_places
from psrpc.core.errors import InvalidArgument, InvalidJob, LaunchFailed
from psrpc.ops import extras
from tests.e2e.cluster import EXAMPLES

JOB = EXAMPLES / "mnist_dnn.py"
GPU_NODE = {"CPU": 4, "GPU": 1}


def bundles(*each: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    return {f"worker-{index}": bundle for index, bundle in enumerate(each)}


@pytest.mark.parametrize(
    ("asked", "strategy", "nodes", "said"),
    [
        ([{"CPU": 1}] * 5, "PACK", [{"CPU": 2}] * 2, "5 processes need 5 CPU, and Ray has 4 CPU"),
        ([{"GPU": 1}], "PACK", [{"CPU": 2}], "need 1 GPU, and Ray has 0 GPU on 1 node; ask for"),
        ([{"CPU": 3}], "SPREAD", [{"CPU": 2}] * 2, "worker-0 needs 3 CPU, and no node of Ray has"),
        ([{"CPU": 2}] * 2, "STRICT_PACK", [{"CPU": 2}] * 2, "STRICT_PACK needs 4 CPU on one node"),
        ([{"CPU": 1}] * 3, "STRICT_SPREAD", [{"CPU": 9}] * 2, "a node for each of 3 processes"),
    ],
)
def test_a_cluster_that_never_fits_is_refused(
    asked: list[dict[str, float]], strategy: str, nodes: list[dict[str, float]], said: str
) -> None:
    with pytest.raises(LaunchFailed, match=said) as refused:
        check_places(bundles(*asked), strategy, nodes)
    assert "\n" not in str(refused.value)


def test_a_cluster_that_fits_is_not() -> None:
    check_places(bundles({"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}), "SPREAD", [GPU_NODE] * 2)
    check_places(bundles({"CPU": 0.5}, {"CPU": 0.5}), "STRICT_PACK", [{"CPU": 1}])
    check_places(bundles({"CPU": 1}, {"CPU": 1}), "STRICT_SPREAD", [{"CPU": 1}] * 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "pack"}, "strategy is 'pack'; expected PACK, SPREAD, STRICT_PACK"),
        ({"resources": {"workers": {"CPU": 1}}}, "resources has 'workers'; expected coordinator"),
        ({"resources": {"worker": {"CPU": 0}}}, "resources of worker is {'CPU': 0}; expected pos"),
        ({"resources": {"worker": {}}}, "resources of worker is {}; expected positive amounts"),
        ({"max_restarts": -1}, "max_restarts is -1; expected 0 or more"),
        ({"place_s": 0}, "place_s is 0; expected seconds above 0"),
        ({"shard": 2}, "a cluster has no option 'shard'; did you mean 'shards'?"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        launch.ray(JOB, run_dir=tmp_path / "run", insecure=True, **options)
    assert str(refused.value).startswith(said)
    assert not (tmp_path / "run").exists()


def test_ray_that_is_missing_or_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(extras, "find_spec", lambda _module: None)
    with pytest.raises(
        InvalidJob, match=r"a launch on Ray needs Ray, which is not .*\[ray\]'$"
    ) as no:
        launch.ray(JOB, run_dir=tmp_path / "run", insecure=True)
    assert no.value.code == extras.CODE
    monkeypatch.setattr(extras, "find_spec", lambda _module: object())
    monkeypatch.setattr(metadata, "version", lambda _name: "2.9.3")
    monkeypatch.setattr(metadata, "requires", lambda _name: ['ray<3,>=2.50; extra == "ray"'])
    with pytest.raises(InvalidJob, match=r"a launch on Ray needs ray 2.50 or newer; 2.9.3 is"):
        launch.ray(JOB, run_dir=tmp_path / "run", insecure=True)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_processes_and_needs_no_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["launch", "ray", str(JOB), "--run-dir", str(run), "--insecure", "--shards", "2"]
    words += ["--resources", "worker=CPU:2,GPU:1", "--strategy", "SPREAD", "--port", "7000"]
    assert main([*words, "--dry-run"]) == 0
    group, coordinator, *shards, worker = capsys.readouterr().out.splitlines()
    assert group == "placement group: SPREAD"
    assert coordinator.startswith("coordinator (1 CPU): python -P -m coordinator.cli serve --job")
    assert coordinator.endswith("--bind HOST:7000")
    assert [line.partition(" ")[0] for line in shards] == ["shard-0", "shard-1"]
    assert worker.startswith("worker-a (2 CPU, 1 GPU): python -P -m worker.cli run --job")
    assert worker.endswith("--coordinator HOST:7000")
    assert not run.exists()
    for wrong in ("shard=fast", "shard=4"):
        assert main([*words, "--resources", wrong, "--dry-run"]) == 2
        assert f"PS110: --resources is {wrong!r}; expected ROLE" in capsys.readouterr().err
    assert main([*words, "--resources", "worker=CPU:1", "--dry-run"]) == 2
    assert "PS110: --resources has worker twice" in capsys.readouterr().err


def test_a_ray_that_does_not_answer_is_not_awaited() -> None:
    with pytest.raises(LaunchFailed, match=r"Ray at 127.0.0.1:1 does not answer: Connection ref"):
        check_answers("127.0.0.1:1")
    for address in ("auto", "host", "host:port"):
        with pytest.raises(InvalidArgument, match=f"is '{address}'; expected HOST:PORT"):
            check_answers(address)
