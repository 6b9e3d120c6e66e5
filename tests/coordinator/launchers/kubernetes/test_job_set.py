"""The manifest of a cluster for Kubernetes, and what is refused before there is one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import pserver
from coordinator.cli.__main__ import main
from coordinator.launchers.kubernetes.cluster import KubernetesCluster, KubernetesOptions
from coordinator.launchers.kubernetes.job_set import MOST_JOB_BYTES, objects, printed, secrets
from coordinator.launchers.plan import ClusterOptions, plan_of
from psrpc.core.errors import InvalidJob, PsError
from tests.e2e.cluster import EXAMPLES
from tests.psrpc.options.test_completion import PARSERS

JOB = EXAMPLES / "mnist_dnn.py"


def cluster(job: Path = JOB, in_image: bool = False, **more: Any) -> KubernetesCluster:
    said = {"run_dir": Path("runs/first"), "shards": 2, "workers": 3, "insecure": True, **more}
    plan = plan_of(job, ClusterOptions(**said), elsewhere=in_image)
    return KubernetesCluster(
        plan, KubernetesOptions(image="a/b:1", in_image=in_image, cpus="2", gpus=1)
    )


def jobs_of(described: KubernetesCluster) -> dict[str, Any]:
    spec = objects(described)[-1]["spec"]
    return {each["name"]: each["template"]["spec"] for each in spec["replicatedJobs"]}


def container(job: Any) -> Any:
    [found] = job["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    ("more", "hosted"),
    [
        ({"shards": 0}, True),
        ({"overrides": ("dense=allreduce",)}, True),
        ({"job": "dense='allreduce'"}, True),
        ({"job": "dense='allreduce'", "overrides": ("dense=shards",)}, False),
        ({}, False),
    ],
)
def test_workers_that_host_parameters_have_what_a_shard_has(
    tmp_path: Path, more: dict[str, Any], hosted: bool
) -> None:
    job = tmp_path / "job.py"
    job.write_text(f"from pserver import Job\njob = Job({more.pop('job', '')})\n")
    certs = tmp_path / "certs"
    assert main(["certs", "init", str(certs)]) == 0
    described = cluster(job, insecure=False, certs=certs, **more)
    worker = container(jobs_of(described)["worker"])
    volumes = {each["name"] for each in worker["volumeMounts"]}
    assert ("runs" in volumes) is hosted
    host = ["--advertise", "first-worker-0-$(JOB_COMPLETION_INDEX).first"]
    at = worker["args"].index("--no-shm") + 1
    assert (worker["args"][at : at + 2] == host) is hosted
    of_worker = secrets(described)[-1]["data"]
    assert of_worker.keys() - {"ca.crt", "worker.crt", "worker.key"} == (
        {"shard.crt", "shard.key"} if hosted else set()
    )
    # A token takes the place of a worker's certificate, and not of a shard's.
    by_token = cluster(job, insecure=False, certs=certs, token_file=certs / "ca.key", **more)
    assert secrets(by_token)[-1]["data"].keys() == (
        {"ca.crt", "token", "shard.crt", "shard.key"} if hosted else {"ca.crt", "token"}
    )


def test_a_cluster_without_shards_has_no_job_for_them() -> None:
    described = cluster(shards=0, workers=2)
    assert list(jobs_of(described)) == ["coordinator", "worker"]
    assert described.plan.tasks == 3
    # Kubeflow calls the workers nodes, also in the names of their hosts.
    runtime = objects(replace(described, kubeflow=True))[-2]
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][-1]["template"]["spec"]
    assert "first-node-0-$(JOB_COMPLETION_INDEX).first" in container(node)["args"]


def test_the_commands_of_all_pods_can_be_read(tmp_path: Path) -> None:
    """Also those of the probes."""
    (tmp_path / "ca.crt").touch()
    parsers = {program: make() for program, make in PARSERS.items()}
    secured = {"insecure": False, "certs": tmp_path, "token_file": tmp_path / "token"}
    plain: dict[str, Any] = {}
    for more in (plain, secured):
        for job in jobs_of(cluster(mode="ssp", replicas=2, **more)).values():
            one = container(job)
            words = [each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in one["args"]]
            [program] = one["command"]
            parsers[program].parse_args(words)
            for probe in ("startupProbe", "livenessProbe"):
                program, *words = one[probe]["exec"]["command"]
                parsers[program].parse_args(words)


def test_pods_have_names_that_stay_and_what_is_theirs_alone() -> None:
    jobs = jobs_of(cluster())
    shard = container(jobs["shard"])["args"]
    assert shard[shard.index("--run-dir") + 1] == "/runs/runs/first"
    assert (
        shard[shard.index("--advertise") + 1] == "first-shard-0-$(JOB_COMPLETION_INDEX).first:5000"
    )
    worker = container(jobs["worker"])
    assert worker["args"][-5:-3] == ["--coordinator", "first-coordinator-0-0.first:5000"]
    assert worker["resources"] == {"requests": {"cpu": "2"}, "limits": {"nvidia.com/gpu": 1}}
    assert container(jobs["shard"])["resources"] == {"requests": {"cpu": "2"}}
    mounted = {
        role: {each["name"] for each in container(job)["volumeMounts"]}
        for role, job in jobs.items()
    }
    assert {role: names - {"tmp", "shm"} for role, names in mounted.items()} == {
        "coordinator": {"runs", "job"},
        "shard": {"runs"},
        "worker": {"job"},
    }


def test_single_pods_are_replaced_and_the_set_never_begins_again() -> None:
    described = cluster()
    spec = objects(described)[-1]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 0
    assert [each["action"] for each in spec["failurePolicy"]["rules"]] == ["FailJobSet"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["coordinator"]}
    found = {}
    for role, job in jobs_of(described).items():
        rules = [each for each in job["podFailurePolicy"]["rules"] if "onExitCodes" in each]
        found[role] = {each["action"]: each["onExitCodes"]["values"] for each in rules}
        assert job["podReplacementPolicy"] == "Failed"
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 75
    passing = {"Ignore": [75, 130]}
    assert found == {
        "coordinator": {"FailJob": [2, 130], "Ignore": [75]},
        "shard": {"FailJob": [2], **passing},
        "worker": {"FailIndex": [2], **passing},
    }


@pytest.mark.parametrize(
    "content",
    [b"x = '\t$(A) %s \xc3\xa9'  \r\ny = 1\r\n", b"\n\n# \x85\n", b"# coding: latin-1\n# \xff\n"],
)
def test_the_job_file_arrives_as_it_is(tmp_path: Path, content: bytes) -> None:
    import base64

    job = tmp_path / "job.py"
    job.write_bytes(content)
    found = list(yaml.safe_load_all(printed(cluster(job))))
    [brought] = [each for each in found if each["kind"] == "ConfigMap"]
    if "data" in brought:
        assert brought["data"]["job.py"].encode() == content
    else:
        assert base64.b64decode(brought["binaryData"]["job.py"]) == content


def test_arguments_are_not_expanded_by_kubernetes() -> None:
    job = jobs_of(cluster(overrides=("init_from=$(HOME)$$",)))["coordinator"]
    assert "init_from=$$(HOME)$$$$" in container(job)["args"]


def test_a_job_file_that_no_configmap_has_goes_into_the_image(tmp_path: Path) -> None:
    job = tmp_path / "my job.py"
    job.touch()
    with pytest.raises(InvalidJob, match=r"'my job.py' is no name in a ConfigMap: .*--in-image"):
        objects(cluster(job))
    large = tmp_path / "job.py"
    large.write_bytes(b"#" * (MOST_JOB_BYTES + 1))
    with pytest.raises(InvalidJob, match="has 1000001 bytes; a ConfigMap has 1000000; put it in"):
        objects(cluster(large))
    args = container(jobs_of(cluster(Path("examples/none.py"), in_image=True))["worker"])["args"]
    assert args[:3] == ["run", "--job", "examples/none.py"]


def test_a_dry_run_has_no_keys_and_says_how_to_make_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs = tmp_path / "certs"
    assert main(["certs", "init", str(certs)]) == 0
    capsys.readouterr()
    options = ["--image", "a/b:1", "--run-dir", "first", "--certs", str(certs), "--dry-run"]
    assert main(["launch", "kubernetes", str(JOB), *options]) == 0
    said = capsys.readouterr().out
    assert "PRIVATE KEY" not in said
    assert "kind: Secret" not in said
    assert (
        f"#   kubectl create secret generic first-shard --from-file=ca.crt={certs}/ca.crt" in said
    )
    made = secrets(cluster(insecure=False, certs=certs))
    assert [sorted(each["data"]) for each in made][2] == ["ca.crt", "worker.crt", "worker.key"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "there is no kubectl here; install it, or see with --dry-run"),
        ({"run_dir": "My_Run"}, "would be called 'My_Run'; expected 41 letters .*: --name my-run"),
        ({"run_dir": "a" * 42}, f"digits and dashes at most: --name {'a' * 41}$"),
        ({"run_dir": "7"}, "the JobSet would be called '7'.*: --name first"),
        (
            {"run_dir": "/srv/first"},
            "'/srv/first'; expected a directory in the claim, such as first",
        ),
        ({"run_dir": "../first"}, "expected a directory in the claim"),
        ({"image": "My Image"}, "--image is 'My Image'; expected a form like registry/team"),
        ({"memory": "4 GB"}, "--memory is '4 GB'; expected a form like 4Gi"),
        ({"cpus": "many"}, "--cpus is 'many'; expected a form like 2 or 500m"),
        ({"gpus": 0}, "gpus is 0; expected a whole number"),
        ({"pull_policy": "Sometimes"}, "expected Always or IfNotPresent or Never"),
        ({"memry": "4Gi"}, "a cluster has no option 'memry'; did you mean 'memory'?"),
        ({"insecure": False}, "needs --certs DIR"),
    ],
)
def test_what_kubernetes_refuses_is_refused_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = {"run_dir": "first", "image": "a/b:1", "insecure": True, **more}
    with pytest.raises(PsError, match=said) as refused:
        pserver.launch.kubernetes(JOB, **given)
    assert "\n" not in str(refused.value)


def test_without_pyyaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidJob, match=r"PyYAML, .*: pip install 'tf-pserver\[kubernetes\]'"):
        printed(cluster())


def test_kubeflow_s_trainer_is_the_workers() -> None:
    described = replace(cluster(), kubeflow=True)
    *_, runtime, job = objects(described)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "first"
    assert job["spec"]["trainer"] == runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [each["name"] for each in jobs] == ["coordinator", "shard", "node"]
    node = jobs[2]["template"]
    assert node["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert container(node["spec"])["name"] == "node"
    rules = node["spec"]["podFailurePolicy"]["rules"]
    assert {each["onExitCodes"]["containerName"] for each in rules[:2]} == {"node"}
    assert "metadata" not in jobs[1]["template"]
