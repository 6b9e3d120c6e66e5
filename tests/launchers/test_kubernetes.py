"""The manifest of ``coordinator launch kubernetes``: against the schemas of Kubernetes and JobSet,
and its pods as podman runs them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.launchers.kubernetes.cluster import KubernetesCluster, KubernetesOptions
from coordinator.launchers.kubernetes.job_set import objects, printed, secrets
from coordinator.launchers.plan import ClusterOptions, plan_of
from tests.docker.engine import ROOT, base_image, run
from tests.docs.following import follow_page
from tests.docs.host import Shell
from tests.e2e.cluster import EXAMPLES, JOBS, Process, command, until
from tests.e2e.test_tune import summary, table
from tests.launchers.api_server import api_server, kubeconfig
from tests.launchers.controllers import controlled
from tests.launchers.podman import podman, podman_network
from tests.launchers.podman_engine import Ended, PodmanCluster
from tests.launchers.schemas import check
from tests.launchers.test_slurm import counted

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]

IMAGE = "docker.io/library/tf-pserver:launchers"
JOB = Path("examples/mnist_dnn.py")
"""In the image."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for podman, which has the project's image."""
    folder = tmp_path_factory.mktemp("podman")
    with (
        podman_network(folder, "launchers"),
        base_image() as arguments,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in arguments.items():
            patch.setenv(name, value)
        given = ["--build-arg=BASE_IMAGE", "--target=worker", f"--tag={IMAGE}"]
        run(["docker", "build", "-q", "-f", ROOT / "docker/Dockerfile", *given, ROOT])
        have = images(folder)
        if have[0] != have[1]:
            # Before it has another name, since it would stay without one. It has 2.6 GB, so that
            # the one that is up to date is kept.
            if have[1]:
                podman(folder, "rmi", "-f", IMAGE)
            podman(folder, "pull", "-q", f"docker-daemon:{IMAGE}")
        yield folder


def images(folder: Path) -> tuple[str, str]:
    """Returns the image of docker, and that of podman, which is empty if it has none."""
    return (
        run(["docker", "image", "inspect", "-f", "{{.Id}}", IMAGE]),
        podman(folder, "images", "-q", "--no-trunc", IMAGE),
    )


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    made = tmp_path / "certs"
    subprocess.run(command("coordinator", "certs", "init", made), check=True, capture_output=True)
    return made


def cluster(certs: Path, in_image: bool = True, **more: Any) -> KubernetesCluster:
    said = {"run_dir": Path("first"), "shards": 2, "workers": 2, "certs": certs, **more}
    job = JOB if in_image else EXAMPLES / JOB.name
    plan = plan_of(job, ClusterOptions(**said), elsewhere=in_image)
    options = KubernetesOptions(image=IMAGE, in_image=in_image)
    return KubernetesCluster(plan, options)


def test_the_manifest_follows_the_schemas(certs: Path) -> None:
    described = cluster(certs)
    options = replace(
        described.options,
        cpus="500m",
        memory="2Gi",
        gpus=1,
        pull_policy="Always",
        pull_secret="registry",
        storage_class="nfs",
        data_claim="data",
        in_image=False,
    )
    job = EXAMPLES / "mnist_dnn.py"
    plan = replace(
        described.plan,
        job=job,
        options=replace(described.plan.options, token_file=certs / "ca.key"),
    )
    for each in (
        described,
        KubernetesCluster(plan, options),
        KubernetesCluster(plan, options, kubeflow=True),
    ):
        found = [*secrets(each), *objects(each)]
        kinds = {document["kind"] for document in found}
        assert {"Secret", "PersistentVolumeClaim", "NetworkPolicy", each.kind} <= kinds
        for document in found:
            check(document)


def test_the_check_of_schemas_finds_what_is_wrong(certs: Path) -> None:
    found = objects(cluster(certs))[-1]
    found["spec"]["replicatedJobs"][2]["template"]["spec"]["completion"] = 2
    with pytest.raises(AssertionError, match=r"replicatedJobs\[2\].template.spec.completion'"):
        check(found)


def test_killed_and_evicted_pods_come_back_and_cost_no_batch(
    engine: Path, certs: Path, tmp_path: Path
) -> None:
    described = cluster(certs, overrides=("epochs=8",), mode="sync")
    documents = [*secrets(described), *yaml.safe_load_all(printed(described))]
    pods = PodmanCluster(engine, tmp_path, documents, "launchers")
    try:
        pods.start()
        until(lambda: epochs(pods) > 0, "the first epoch")
        roles = [("coordinator", 0), ("shard", 0), ("shard", 1), ("worker", 0), ("worker", 1)]
        assert [each for each in roles if not pods.healthy(*each)] == []
        pods.kill("shard", 1)
        pods.scale("worker", 3)
        another_epoch(pods, "a shard was killed")
        pods.kill("worker", 0)
        pods.stop("coordinator", 0)
        another_epoch(pods, "a worker was killed and the coordinator evicted")
        pods.scale("worker", 2)
        assert pods.wait() == "completed", pods.ended
        assert counted(pods.runs / "first")["batches"] == 9600
        ends = [
            (each.role, each.index, each.code) for each in pods.ended if each.then == "replaced"
        ]
        assert {("shard", 1, 137), ("worker", 0, 137), ("coordinator", 0, 75)} <= set(ends)
        assert Ended("worker", 2, 75, "removed") in pods.ended
    finally:
        pods.delete()


@pytest.mark.long
def test_workers_that_host_the_parameters_are_killed_and_evicted_and_cost_no_batch(
    engine: Path, certs: Path, tmp_path: Path
) -> None:
    settings = ("epochs=8", "dense=allreduce", "replicas=2")
    described = cluster(certs, shards=0, overrides=settings, mode="sync")
    documents = [*secrets(described), *yaml.safe_load_all(printed(described))]
    pods = PodmanCluster(engine, tmp_path, documents, "launchers")
    try:
        pods.start()
        until(lambda: epochs(pods) > 0, "the first epoch")
        pods.kill("worker", 0)
        another_epoch(pods, "a worker was killed")
        pods.stop("worker", 1)
        another_epoch(pods, "the other worker was evicted")
        assert pods.wait() == "completed", pods.ended
        assert counted(pods.runs / "first")["batches"] == 9600
        ends = {(each.role, each.index, each.code) for each in pods.ended}
        assert {("worker", 0, 137), ("worker", 1, 75)} <= ends
        assert {each.role for each in pods.ended} == {"coordinator", "worker"}
    finally:
        pods.delete()


@pytest.mark.long
def test_the_page_leads_to_a_trained_model(engine: Path, tmp_path: Path) -> None:
    """The objects that ``kubectl`` applies are those that run."""
    with (
        api_server() as server,
        controlled(server, engine, tmp_path, "launchers") as controllers,
        Shell(tmp_path, {**os.environ, **kubeconfig(server, tmp_path), "IMAGE": IMAGE}) as host,
    ):
        done = follow_page("docs/kubernetes.md", host)
        built, ran = images(engine)
        assert built == ran
        first, second = controllers.clusters.values()
        assert Ended("shard", 0, 75, "replaced") in first.ended
        assert {each.role for each in second.ended} == {"coordinator", "shard", "node"}
        for cluster, batches in ((first, 7920), (second, 990)):
            assert cluster.state == "completed", cluster.ended
            assert counted(cluster.runs / cluster.name)["batches"] == batches
        [read] = [each.output for each in done if "logs reader" in each.command]
        error = re.search(r"mean error (\S+)", read)
        assert error, read
        assert float(error[1]) < 1e-3


STUDY_EPOCHS = 60


def tuned(study: Path, **env: str) -> Process:
    """Starts a study of four trials, of which the third diverges, or goes on with it."""
    space = "optimizer.learning_rate=choice(0.01, 0.02, 1e6, 0.05)"
    said = ("--sampler", "grid", "--parallel", "2", "--no-dashboard", "--insecure")
    trials = ("--set", f"epochs={STUDY_EPOCHS}", "--set", "checkpoint_every=100")
    where = ("--on", "kubernetes", "--image", IMAGE, "--kubernetes", "pull_policy=Never")
    words = ("tune", JOBS / "searched.py", "--run-dir", study, "--space", space, *said)
    return Process("tune", "coordinator", *words, *trials, *where, **env)


@pytest.mark.long
def test_a_study_trains_nothing_twice_whatever_is_killed(engine: Path, tmp_path: Path) -> None:
    """A shard is killed, then the command, and at last the pod by which it reads the claim."""
    pytest.importorskip("optuna")
    study = tmp_path / "study"
    with (
        api_server() as server,
        controlled(server, engine, tmp_path, "launchers") as controllers,
    ):
        env = kubeconfig(server, tmp_path)
        running = tuned(study, **env)
        running.wait_for("trial 0 epoch 2:")
        first = controllers.of("-0")
        first.kill("shard", 0)
        running.wait_for(f"trial 1 epoch {STUDY_EPOCHS // 2}:")
        running.end()
        assert first.state in ("running", "completed"), "it goes on without the command"
        running = tuned(study, **env)
        running.wait_for("trial 3 begins")
        [reader] = [path for path in server.objects if path.endswith("-files")]
        subprocess.run(
            ["kubectl", "delete", "pod", reader.rpartition("/")[2]],
            env={**os.environ, **env},
            check=True,
            capture_output=True,
        )
        assert running.wait() == 0, running.text()
        running.end()
        assert ("shard", 0, 137) in [(each.role, each.index, each.code) for each in first.ended]
        rows = table(study)
        assert [row["state"] for row in rows] == ["complete", "complete", "failed", "complete"]
        assert "NaN" in rows[2]["reason"]
        for trial in (0, 1, 3):
            found = summary(study, trial)["counted"]
            batches = STUDY_EPOCHS * 40
            assert (found["batches"], found["counted"], found["twice"]) == (batches, batches, 0)
        until(lambda: not controllers.clusters, "the last pods to drain")
        assert [each["kind"] for each in server.objects.values()] == ["PersistentVolumeClaim"]


def another_epoch(pods: PodmanCluster, what: str) -> None:
    seen = epochs(pods)
    until(lambda: epochs(pods) > seen, f"an epoch after {what}")


def epochs(pods: PodmanCluster) -> int:
    """Returns how many epochs are done."""
    assert pods.state == "running", (pods.state, pods.ended)
    history = pods.runs / "first" / "history.csv"
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def test_a_refused_command_ends_all_and_is_not_repeated(
    engine: Path, certs: Path, tmp_path: Path
) -> None:
    # With the job file of a ConfigMap.
    described = cluster(certs, in_image=False, shards=1, workers=1, overrides=("epochs=-1",))
    pods = PodmanCluster(engine, tmp_path, [*secrets(described), *objects(described)], "launchers")
    try:
        pods.start()
        assert pods.wait() == "failed", pods.ended
        assert pods.ended[0].code == 2
        [log] = tmp_path.glob("first-coordinator-*.log")
        assert "epochs is -1" in log.read_text()
        assert {each.then for each in pods.ended} <= {"failed", "lost", "removed"}
    finally:
        pods.delete()
