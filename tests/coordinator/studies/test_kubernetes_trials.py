"""Trials as JobSets, with a Kubernetes that a test plays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.core.lifecycle import STOPPED
from coordinator.launchers.kubernetes.kubectl import Kubectl
from coordinator.studies import claim_files
from coordinator.studies.kubernetes_trials import KubernetesTrial
from coordinator.studies.trial_clusters import clusters_of, pod_options
from coordinator.studies.trial_pods import TrialPods, TrialView, culprit
from coordinator.tune.directory import PLACE, StudyDirectory
from coordinator.tune.options import TuneArguments
from coordinator.tune.trial_run import RunEnd
from psrpc.core.errors import InvalidArgument, LaunchFailed
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from tests.e2e.cluster import JOBS

HISTORY = "epoch,val_loss\n1,0.5\n"
OPTIONS = TuneArguments(image="a/b:1", insecure=True)


@dataclass
class PlayedKubectl:
    """Keeps what it is asked, and what pods have written.

    Attributes:
        files: of each run, as :mod:`coordinator.studies.claim_files` prints them.
        down: whether calls fail.
        serves: whether the startup probes of pods have succeeded.
    """

    asked: list[str] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    down: bool = False
    serves: bool = True

    def apply(self, made: Sequence[Any]) -> None:
        self._answer()
        for each in made:
            self.objects[f"{each['kind']}/{each['metadata']['name']}"] = each

    def get(self, kind: str, name: str) -> Any:
        return self.objects.get(f"{kind.capitalize()}/{name}")

    def run(self, *words: str, timeout_s: float = 0.0) -> str:
        self._answer()
        if words[0] == "exec" and words[1].endswith("-files"):
            return json.dumps({run: self.files.get(run, {}) for run in words[7:]})
        if words[0] == "get":
            [name, wanted] = words[words.index("-l") + 1].split("=")
            items = [
                each
                for each in self.objects.values()
                if each["kind"] in ("JobSet", "Pod") and each["metadata"]["labels"][name] == wanted
            ]
            return json.dumps({"items": items})
        self.asked.append(" ".join(words))
        return "one\nerror PS103: epochs is -1\nlast\n" if words[0] == "logs" else ""

    def _answer(self) -> None:
        if self.down:
            raise LaunchFailed("kubectl get: refused")

    @property
    def name(self) -> str:
        [claim] = [each for each in self.objects if each.endswith("-runs")]
        return claim.removeprefix("PersistentVolumeClaim/").removesuffix("-runs")

    def pod(self, role: str, phase: str = "Running", code: int | None = None) -> None:
        """Makes a pod of the first trial."""
        labels = {
            "app.kubernetes.io/instance": f"{self.name}-0",
            "app.kubernetes.io/part-of": self.name,
            "app.kubernetes.io/component": role,
        }
        state = {} if code is None else {"terminated": {"exitCode": code, "finishedAt": "1"}}
        container = {"state": state, "image": "", "started": self.serves and code is None}
        status = {"phase": phase, "containerStatuses": [container]}
        metadata = {"name": role, "labels": labels}
        self.objects[f"Pod/{role}"] = {"kind": "Pod", "metadata": metadata, "status": status}

    def end(self, kind: str, phase: str = "", reason: str = "") -> None:
        """Ends the JobSet of the first trial, with a summary if ``phase`` says so."""
        status = {"conditions": [{"type": kind, "status": "True"}]}
        self.objects[f"JobSet/{self.name}-0"]["status"] = status
        if phase:
            text = json.dumps({"phase": phase, "reason": reason})
            self.files["trial-0000"] = {"history.csv": HISTORY, "summary.json": text}


@dataclass
class Study:
    kubectl: PlayedKubectl
    directory: StudyDirectory
    pods: TrialPods
    lines: list[str]

    def trial(self) -> KubernetesTrial:
        """Starts the first trial."""
        pods = pod_options(OPTIONS)
        clusters = clusters_of(JOBS / "searched.py", OPTIONS, pods, self.directory)
        run_dir = self.directory.trial(0)
        run_dir.mkdir(exist_ok=True)
        cluster = clusters.cluster(0, {"optimizer.learning_rate": 0.1})
        found = KubernetesTrial(0, cluster, run_dir, self.pods, self.lines.append)
        found.start()
        return found


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    for name in ("trial_pods.POLL_S", "trial_pods.STRAY_S", "kubernetes_trials.ASK_AGAIN_S"):
        monkeypatch.setattr(f"coordinator.studies.{name}", 0.0)
    return opened(PlayedKubectl(), tmp_path)


def opened(kubectl: PlayedKubectl, path: Path) -> Study:
    directory, lines = StudyDirectory(path), list[str]()
    clusters = clusters_of(JOBS / "searched.py", OPTIONS, pod_options(OPTIONS), directory)
    played = cast("Kubectl", kubectl)
    metadata = {"name": f"{clusters.name}-files", "labels": clusters.study.labels}
    reader = {"kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}
    kubectl.objects[f"Pod/{clusters.name}-files"] = reader
    pods = TrialPods(clusters.study, directory, played, lines.append)
    pods.open()
    return Study(kubectl, directory, pods, lines)


def test_a_trial_is_a_job_set_whose_evaluations_come_here(study: Study) -> None:
    trial, kubectl = study.trial(), study.kubectl
    assert trial.look() is None
    job_set = kubectl.objects[f"JobSet/{kubectl.name}-0"]
    [said] = [
        each["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        for each in job_set["spec"]["replicatedJobs"]
        if each["name"] == "coordinator"
    ]
    assert f"/runs/{kubectl.name}/trial-0000" in said
    assert {"evaluate_every_epoch=true", "optimizer.learning_rate=0.1"} <= set(said)
    kubectl.files["trial-0000"] = {"history.csv": HISTORY}
    assert trial.look() is None
    assert (study.directory.trial(0) / "history.csv").read_text() == HISTORY
    kubectl.end("Completed", "done")
    kubectl.files["trial-0000/tensorboard"] = {"events": "YWJj"}
    assert trial.look() == RunEnd(DONE, "")
    assert (study.directory.trial(0) / "tensorboard" / "events").read_bytes() == b"abc"
    # What it leaves is deleted when another trial is looked at, which is after the record.
    assert not kubectl.asked
    study.pods.view(1)
    assert len(kubectl.asked) == 2
    assert all(f"instance={kubectl.name}-0" in each for each in kubectl.asked)


def test_a_command_takes_over_what_one_that_was_killed_has_left(study: Study) -> None:
    kubectl = study.kubectl
    study.trial().look()
    kubectl.pod("coordinator")
    stray = json.loads(json.dumps(kubectl.objects[f"JobSet/{kubectl.name}-0"]))
    stray["metadata"]["name"] = f"{kubectl.name}-7"
    kubectl.objects[f"JobSet/{kubectl.name}-7"] = stray
    before = dict(kubectl.objects)
    again = opened(kubectl, study.directory.path)
    trial = again.trial()
    assert trial.look() is None
    assert kubectl.objects == before
    trial.look()
    assert [each for each in kubectl.asked if f"instance={kubectl.name}-7" in each]
    assert not [each for each in kubectl.asked if f"instance={kubectl.name}-0" in each]


def test_a_trial_is_asked_to_end_early_until_it_does(study: Study) -> None:
    trial, kubectl = study.trial(), study.kubectl
    trial.look()
    trial.end_early()
    trial.look()
    kubectl.serves = False
    kubectl.pod("coordinator")
    trial.look()
    assert not kubectl.asked, "a signal would kill it now"
    kubectl.serves = True
    kubectl.pod("coordinator")
    trial.look()
    trial.look()
    assert kubectl.asked == ["exec coordinator -- sh -c kill -USR1 1"] * 2
    kubectl.end("Completed", "done", "stopped early on request")
    assert trial.look() == RunEnd(DONE, "")


def test_a_stopped_trial_drains_and_is_waited_for(study: Study) -> None:
    trial, kubectl = study.trial(), study.kubectl
    trial.look()
    trial.stop()
    assert trial.look() is None
    assert [each.split()[1] for each in kubectl.asked] == ["jobsets.jobset.x-k8s.io"]
    kubectl.pod("shard")
    del kubectl.objects[f"JobSet/{kubectl.name}-0"]
    assert trial.look() is None, "a pod of it still saves"
    kubectl.pod("shard", "Failed", 75)
    assert trial.look() == RunEnd(INTERRUPTED, "")


@pytest.mark.parametrize(
    ("phase", "reason", "code", "end"),
    [
        ("failed", "the loss is NaN", 1, RunEnd(FAILED, "the loss is NaN")),
        ("failed", STOPPED, 130, RunEnd(INTERRUPTED, STOPPED)),
        (
            "",
            "",
            2,
            RunEnd(FAILED, "pod coordinator ended with status 2: error PS103: epochs is -1"),
        ),
    ],
)
def test_a_job_set_that_failed_has_a_reason(
    study: Study, phase: str, reason: str, code: int, end: RunEnd
) -> None:
    trial, kubectl = study.trial(), study.kubectl
    trial.look()
    kubectl.pod("coordinator", "Failed", code)
    kubectl.end("Failed", phase, reason)
    assert trial.look() == end


def test_a_run_that_has_failed_is_not_started_again(study: Study) -> None:
    """Its Job would do that, since the coordinator exits as after a crash."""
    trial, kubectl = study.trial(), study.kubectl
    trial.look()
    said = json.dumps({"phase": "failed", "reason": "PS603: the loss is NaN"})
    kubectl.files["trial-0000"] = {"history.csv": "", "summary.json": said}
    assert trial.look() is None
    assert [each.split()[:2] for each in kubectl.asked] == [["delete", "jobsets.jobset.x-k8s.io"]]
    del kubectl.objects[f"JobSet/{kubectl.name}-0"]
    assert trial.look() == RunEnd(FAILED, "PS603: the loss is NaN")


def test_a_job_set_that_a_user_deletes_ends_the_study(study: Study) -> None:
    trial, kubectl = study.trial(), study.kubectl
    trial.look()
    trial.look()
    del kubectl.objects[f"JobSet/{kubectl.name}-0"]
    assert trial.look() == RunEnd(INTERRUPTED, "")
    assert study.lines == [f"trial 0: its JobSet {kubectl.name}-0 was deleted"]


def test_the_study_waits_while_kubernetes_or_the_reading_pod_is_gone(study: Study) -> None:
    trial, kubectl = study.trial(), study.kubectl
    kubectl.down = True
    assert trial.look() is None
    assert trial.look() is None
    assert study.lines == ["warning: the trials are out of sight: kubectl get: refused"]
    kubectl.down = False
    del kubectl.objects[f"Pod/{kubectl.name}-files"]
    assert trial.look() is None
    made = kubectl.objects[f"Pod/{kubectl.name}-files"]
    assert made["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"].endswith("-runs")
    made["status"] = {"phase": "Running"}
    trial.look()
    assert f"JobSet/{kubectl.name}-0" in kubectl.objects


def test_the_pod_that_was_refused_or_ended_first_is_to_blame() -> None:
    def pod(name: str, code: int, at: str, why: str = "Error") -> Any:
        ended = {"exitCode": code, "finishedAt": at, "reason": why}
        return {
            "metadata": {"name": name},
            "status": {"containerStatuses": [{"state": {"terminated": ended}}]},
        }

    others = [pod("coordinator", 75, "1"), pod("shard", 1, "3")]
    full = pod("worker", 137, "2", "OOMKilled")
    assert culprit([*others, full])[0] == "worker"
    assert "ran out of memory; give it more" in culprit([full])[1]
    assert culprit([*others, pod("later", 2, "9")]) == ("later", "ended with status 2")
    assert culprit(others[:1]) == ("", "")
    assert (
        TrialView(0.0, None, [{"metadata": {}, "status": {"phase": "Running"}}]).state == "leaves"
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"image": None}, "--image is missing"),
        ({"slow_down": 2.0}, "--slow-down is not for trials on Kubernetes"),
        ({"kubernetes": ("memry=4Gi",)}, "did you mean memory=...?"),
        ({"kubernetes": ("memory",)}, "expected NAME=VALUE"),
        ({"kubernetes": ("gpus=0",)}, "--kubernetes gpus is '0'; expected"),
        ({"kubernetes": ("memory=much",)}, "--memory is 'much'; expected a form like 4Gi"),
        ({"kubernetes": ("in_image=true",)}, "a study reads the job file here"),
    ],
)
def test_options_are_checked(said: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pod_options(TuneArguments(**{"image": "a/b:1", **said}))
    assert words in str(refused.value)


def test_a_study_keeps_its_name_and_its_claim(tmp_path: Path) -> None:
    def clusters(path: Path, *said: str) -> Any:
        options = TuneArguments(image="a/b:1", insecure=True, kubernetes=said)
        job = JOBS / "searched.py"
        return clusters_of(job, options, pod_options(options), StudyDirectory(path))

    first, other = tmp_path / "My study_1", tmp_path / "b" / "My study_1"
    for path in (first, other):
        path.mkdir(parents=True)
    name = clusters(first, "claim=nfs").name
    assert name.startswith("my-study-1-")
    assert clusters(first, "claim=nfs").name == name
    assert clusters(other, "claim=nfs").name != name
    assert json.loads((first / PLACE).read_text())["volume"] == "nfs"
    with pytest.raises(InvalidArgument, match=r"its trials in claim 'nfs', .* says None"):
        clusters(first)


def test_the_program_in_the_pod_prints_summaries_of_ended_runs_alone(tmp_path: Path) -> None:
    run = tmp_path / "trial-0000"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events").write_bytes(b"abc")
    (run / "history.csv").write_text(HISTORY)
    (run / "summary.json").write_text("{}")
    asked = ["trial-0000", "trial-0000/tensorboard", "trial-0001"]
    found = json.loads(claim_files.files_of(tmp_path, asked))
    assert found["trial-0000"] == {"history.csv": HISTORY}
    assert found["trial-0000/tensorboard"] == {"events": "YWJj"}
    assert found["trial-0001"] == {"history.csv": ""}
    (run / "job.json").write_text("{}")
    (run / "summary.json").write_text("{}")
    assert "summary.json" in json.loads(claim_files.files_of(tmp_path, asked))["trial-0000"]
