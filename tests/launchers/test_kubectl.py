"""How ``kubectl`` submits a cluster: the real one, to a server that has the API alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pserver
from coordinator.studies.kubernetes_trials import kubernetes_trials
from coordinator.tune.options import TuneArguments
from psrpc.core.errors import AlreadyExists, InvalidArgument, LaunchFailed
from tests.e2e.cluster import EXAMPLES, command
from tests.launchers.api_server import ApiServer, api_server, kubeconfig


def has_kubectl() -> bool:
    """Whether there is a kubectl that asks the server to check fields: 1.25 or newer."""
    try:
        said = subprocess.run(
            ["kubectl", "version", "--client", "-o", "json"], capture_output=True, timeout=60
        )
    except FileNotFoundError:
        return False
    version = json.loads(said.stdout)["clientVersion"]
    return (int(version["major"]), int(version["minor"].strip("+"))) >= (1, 25)


pytestmark = pytest.mark.launchers

JOB = EXAMPLES / "mnist_dnn.py"
NAMESPACE = "namespaces/lab"
JOB_SETS = f"apis/jobset.x-k8s.io/v1alpha2/{NAMESPACE}/jobsets"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    if not has_kubectl():
        pytest.skip("needs kubectl 1.25 or newer")
    with api_server() as state:
        for name, value in kubeconfig(state, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield state


def launch(certs: Path | None = None, **more: object) -> str:
    security = {"certs": certs} if certs else {"insecure": True}
    said = {"run_dir": "first", "image": "a/b:1", "namespace": "lab", "wait": 0, **security, **more}
    return pserver.launch.kubernetes(JOB, **said)  # type: ignore[arg-type]


def test_a_cluster_is_submitted_once_all_of_it_is_accepted(server: ApiServer) -> None:
    assert launch() == "first"
    assert [path.rpartition("/")[2] for path in server.objects] == [
        "first-runs",
        "first-job",
        "first",
        "first",
    ]
    rehearsed, made = server.calls[:4], server.calls[4:]
    assert all("dryRun=All" in path for _, path in rehearsed)
    assert not any("dryRun" in path for _, path in made)


def test_a_run_that_has_ended_goes_on_and_one_that_runs_does_not(server: ApiServer) -> None:
    ended = {"conditions": [{"type": "Failed", "status": "True"}]}
    launch()
    with pytest.raises(AlreadyExists, match=r"JobSet 'first' runs; .* kubectl delete jobset first"):
        launch()
    server.objects[f"{JOB_SETS}/first"]["status"] = ended
    server.calls.clear()
    launch(workers=3)
    assert [method for method, _ in server.calls].count("DELETE") == 1
    jobs = server.objects[f"{JOB_SETS}/first"]["spec"]["replicatedJobs"]
    assert jobs[2]["template"]["spec"]["completions"] == 3
    with pytest.raises(AlreadyExists, match=r"belongs to the run directory 'first'; choose ano"):
        launch(run_dir="other", name="first")


def test_keys_go_to_secrets_of_their_role_and_the_authority_s_stays(
    server: ApiServer, tmp_path: Path
) -> None:
    certs = tmp_path / "certs"
    subprocess.run(command("coordinator", "certs", "init", certs), check=True, capture_output=True)
    launch(certs)
    secrets = {path: each for path, each in server.objects.items() if "/secrets/" in path}
    assert [sorted(each["data"]) for each in secrets.values()] == [
        ["ca.crt", f"{role}.crt", f"{role}.key"] for role in ("coordinator", "shard", "worker")
    ]
    (certs / "worker.key").chmod(0o644)
    with pytest.raises(InvalidArgument, match=r"worker.key may be read by others"):
        launch(certs, run_dir="second")


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            (403, "Forbidden", 'jobsets is forbidden: User "ann" cannot patch'),
            r'kubectl apply: .*User "ann" cannot patch.*; ask the cluster\'s administrator for a R',
        ),
        (
            (404, "NotFound", 'namespaces "lab" not found'),
            r'namespaces "lab" not found; make it: kubectl create namespace lab',
        ),
        (
            (500, "InternalError", 'failed calling webhook "mjobset.kb.io": no endpoints'),
            "the JobSet controller does not run; see its pods: kubectl get pods -n jobset-system",
        ),
        (
            (422, "Invalid", 'spec.image: Invalid value: "x"'),
            r'kubectl apply: .*spec.image: Invalid value: "x"',
        ),
    ],
)
def test_a_refusal_is_one_line_with_the_fix(
    server: ApiServer, refusal: tuple[int, str, str], said: str
) -> None:
    server.refusal = refusal
    with pytest.raises(LaunchFailed, match=said) as raised:
        launch()
    assert "\n" not in str(raised.value)
    assert not server.objects


def test_a_cluster_without_jobsets_and_no_cluster_are_told(server: ApiServer) -> None:
    with pytest.raises(LaunchFailed, match=r"context.*; `kubectl config get-contexts` says"):
        launch(context="other")
    server.lacks = "jobset"
    with pytest.raises(LaunchFailed, match=r"has no JobSet; its administrator installs it: kubec"):
        launch()


def test_the_run_directory_has_to_be_seen_by_all_nodes(server: ApiServer) -> None:
    with pytest.raises(InvalidArgument, match=r"--claim is 'disk', and there is no such") as raised:
        launch(claim="disk")
    assert raised.value.code == "PS143"
    claim: Any = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}}
    claim["spec"] = {"accessModes": ["ReadWriteOnce"]}
    server.objects[f"api/v1/{NAMESPACE}/persistentvolumeclaims/disk"] = claim
    with pytest.raises(InvalidArgument, match="allows ReadWriteOnce, so pods of other nodes would"):
        launch(claim="disk")
    launch(claim="disk", access_mode="ReadWriteOnce")
    assert f"{JOB_SETS}/first" in server.objects


def test_a_policy_that_closes_a_port_is_found_before_anything_is_made(server: ApiServer) -> None:
    path = f"apis/networking.k8s.io/v1/{NAMESPACE}/networkpolicies/deny-all"
    policy: Any = {"metadata": {"name": "deny-all", "namespace": "lab", "labels": {}}}
    policy |= {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    server.objects[path] = policy | {"spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    said = r"deny-all closes port 5000 between the pods .*; have .* egress to .*instance=first$"
    with pytest.raises(LaunchFailed, match=said):
        launch()
    assert list(server.objects) == [path]
    server.objects[path]["spec"] = {"podSelector": {"matchLabels": {"role": "web"}}}
    launch()


def test_an_image_that_cannot_be_pulled_is_told(server: ApiServer) -> None:
    waiting = {"reason": "ErrImagePull", "message": "a/b:1: not found"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first-worker-0-0-abcde"},
        "status": {"containerStatuses": [{"image": "a/b:1", "state": {"waiting": waiting}}]},
    }
    server.objects[f"api/v1/{NAMESPACE}/pods/first-worker-0-0-abcde"] = pod
    with pytest.raises(LaunchFailed, match="'a/b:1' cannot be had: a/b:1: not found; ") as raised:
        launch(wait=60)
    assert raised.value.code == "PS142"


def test_a_study_is_refused_before_anything_is_made(server: ApiServer) -> None:
    def tried(*said: str) -> None:
        options = TuneArguments(image="a/b:1", insecure=True, kubernetes=("namespace=lab", *said))
        with kubernetes_trials(str(JOB), options):
            pass

    tried()
    assert {"dryRun=All" in path for _, path in server.calls} == {True}
    with pytest.raises(InvalidArgument, match=r"--claim is 'disk', and there is no such"):
        tried("claim=disk")
    with pytest.raises(LaunchFailed, match=r"`kubectl config get-contexts` says"):
        tried("context=other")
    server.lacks = "jobset"
    with pytest.raises(LaunchFailed, match=r"the cluster has no JobSet"):
        tried()
    assert not server.objects


def test_kubeflow_gets_a_train_job_with_its_runtime(server: ApiServer) -> None:
    said: Any = {"run_dir": "first", "image": "a/b:1", "namespace": "lab", "wait": 0}
    assert pserver.launch.kubeflow(JOB, insecure=True, **said) == "first"
    path = f"apis/trainer.kubeflow.org/v1alpha1/{NAMESPACE}/trainjobs/first"
    assert list(server.objects)[-1] == path
    with pytest.raises(AlreadyExists, match=r"TrainJob 'first' runs; .* delete trainjob first"):
        pserver.launch.kubeflow(JOB, insecure=True, **said)
    server.objects[path]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    pserver.launch.kubeflow(JOB, insecure=True, **said)
    server.lacks = "trainer"
    with pytest.raises(LaunchFailed, match="has no Kubeflow Trainer 2; its administrator inst"):
        pserver.launch.kubeflow(JOB, insecure=True, **said)
