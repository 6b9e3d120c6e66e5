"""The state of the trials of a study in Kubernetes, and their files in its claim."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coordinator.launchers.kubernetes.cluster import (
    INSTANCE,
    PART_OF,
    RUNS,
    KubernetesCluster,
    KubernetesOptions,
)
from coordinator.launchers.kubernetes.job_set import Object, claim
from coordinator.launchers.kubernetes.kubectl import Kubectl
from coordinator.launchers.kubernetes.pods import DRAINED, REFUSED, STOPPED, reading_pod
from coordinator.launchers.kubernetes.starting import wait_started
from coordinator.studies import claim_files
from coordinator.tune.directory import StudyDirectory
from psrpc.core.errors import LaunchFailed
from psrpc.core.text import sanitize
from psrpc.files.storage import replace_text

POLL_S = 3.0
"""How often a study asks Kubernetes, at most."""

ASK_S = 30.0
"""How long an answer may take."""

STRAY_S = 15.0
"""How long a trial may be without an owner: those of a command that was killed go on one by one."""

State = Literal["absent", "runs", "leaves", "completed", "failed"]

_CONDITIONS: Mapping[str, State] = {"Completed": "completed", "Failed": "failed"}
_OWNED = "jobsets.jobset.x-k8s.io"
_BESIDE = "configmaps,secrets,networkpolicies"


@dataclass(frozen=True)
class TrialView:
    """A trial as Kubernetes and the claim had it at one moment.

    Attributes:
        at: when Kubernetes was asked, in monotonic seconds.
        files: history and, if the run has ended, summary, by name; read after the states.
    """

    at: float
    job_set: Object | None = None
    pods: Sequence[Object] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """The state of its JobSet. ``absent`` is without a pod that runs, too."""
        if self.job_set is None:
            left = any(_phase(pod) in ("Pending", "Running") for pod in self.pods)
            return "leaves" if left else "absent"
        if _leaves(self.job_set):
            return "leaves"
        conditions = self.job_set.get("status", {}).get("conditions", ())
        met = (each["type"] for each in conditions if each.get("status") == "True")
        return next((_CONDITIONS[each] for each in met if each in _CONDITIONS), "runs")

    @property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run if it has ended; empty otherwise."""
        try:
            found = json.loads(self.files.get(claim_files.SUMMARY, "{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's pod if it serves; empty otherwise. Before, a signal would
        kill it."""
        for pod in self.pods:
            role = pod["metadata"].get("labels", {}).get("app.kubernetes.io/component")
            containers = pod.get("status", {}).get("containerStatuses", ())
            serves = any(each.get("started") for each in containers)
            if role == "coordinator" and _phase(pod) == "Running" and serves:
                return str(pod["metadata"]["name"])
        return ""


def _leaves(each: Object) -> bool:
    return bool(each["metadata"].get("deletionTimestamp"))


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def culprit(pods: Sequence[Object]) -> tuple[str, str]:
    """Returns the pod that has made a cluster fail, and how it ended, in words; empty if no pod
    says. A refused command counts most, then what ended first: others end because of it."""
    found = []
    for pod in pods:
        for each in pod.get("status", {}).get("containerStatuses", ()):
            ended = each.get("state", {}).get("terminated", {})
            code = ended.get("exitCode", 0)
            if code not in (0, DRAINED, STOPPED):
                how = f"ended with status {code}"
                if ended.get("reason") == "OOMKilled":
                    how = "ran out of memory; give it more: --kubernetes memory=SIZE"
                name, when = pod["metadata"]["name"], ended.get("finishedAt", "")
                found.append((code != REFUSED, when, name, how))
    return min(found)[2:] if found else ("", "")


class TrialPods:
    """The clusters of a study's trials, asked for together. Not thread-safe."""

    def __init__(
        self,
        study: KubernetesCluster,
        directory: StudyDirectory,
        kubectl: Kubectl,
        note: Callable[[str], object],
    ) -> None:
        """``study`` has the claim and the name of the study; ``note`` gets lines for the user."""
        self._study, self._directory, self.kubectl, self._note = study, directory, kubectl, note
        self._reader = f"{study.name}-files"
        self._views: dict[int, TrialView] = {}
        self._watched: set[int] = set()
        self._strays: dict[str, float] = {}
        self._due = 0.0
        self._silent = False

    def open(self) -> None:
        """Makes the claim and the pod that reads it, and waits for the pod.

        Raises:
            LaunchFailed: the pod does not start within ``--kubernetes wait``; says why.
        """
        if not self._study.options.claim:
            self.kubectl.apply([claim(self._study)])
        self._make_reader()
        limit_s = self._study.options.wait or KubernetesOptions.wait
        missing = wait_started(self._readers, 1, time.monotonic, time.sleep, limit_s)
        if missing:
            raise LaunchFailed(
                f"the pod by which the study reads its claim has not started in {limit_s:g} s: "
                f"{missing}; --kubernetes wait=SECONDS waits longer"
            )
        self._poll()

    def close(self) -> None:
        """Deletes all that is left of the study but the claim: clusters drain. Raises
        LaunchFailed."""
        self.delete(f"{PART_OF}={self._study.name}")
        self.kubectl.run("delete", "pod", self._reader, "--ignore-not-found", "--wait=false")

    def name(self, number: int) -> str:
        """Returns the name of a trial's JobSet."""
        return f"{self._study.name}-{number}"

    def watch(self, number: int) -> None:
        """Asks for a trial from now on, at once."""
        self._watched.add(number)
        self._due = 0.0

    def forget(self, number: int) -> None:
        """Deletes what is left of a trial that has ended, when Kubernetes is asked again: by then
        the study has recorded the end."""
        self._watched.discard(number)
        self._strays[self.name(number)] = 0.0
        self._views.pop(number, None)

    def view(self, number: int) -> TrialView | None:
        """Returns the newest view of a watched trial; None without one. While Kubernetes does not
        answer, the last one counts, and the user gets a line."""
        if time.monotonic() >= self._due:
            try:
                self._poll()
                self._silent = False
            except LaunchFailed as error:
                if not self._silent:
                    self._note(f"warning: the trials are out of sight: {error}")
                self._silent = True
            self._due = time.monotonic() + POLL_S
        return self._views.get(number)

    def delete(self, selector: str, *, beside: bool = True) -> None:
        """Deletes JobSets, whose pods drain; with ``beside`` what else was made for them. Raises
        LaunchFailed."""
        words = ["-l", selector, "--ignore-not-found", "--wait=false"]
        self.kubectl.run("delete", _OWNED, *words, "--cascade=foreground", timeout_s=ASK_S)
        if beside:
            self.kubectl.run("delete", _BESIDE, *words, timeout_s=ASK_S)

    def curves(self, number: int, into: Path) -> None:
        """Copies the files for TensorBoard of a trial. Raises LaunchFailed or OSError."""
        name = f"{self._run(number)}{claim_files.CURVES}"
        for file, content in self._read([name])[name].items():
            target = into / PurePosixPath(file).name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(base64.b64decode(content))

    def last_line(self, pod: str) -> str:
        """Returns the last error in the log of a pod, or its last line."""
        try:
            said = self.kubectl.run("logs", pod, "--tail=50", timeout_s=ASK_S)
        except LaunchFailed:
            return ""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error ")]
        return sanitize((errors or lines or [""])[-1])

    def _poll(self) -> None:
        now = time.monotonic()
        words = ("get", f"{_OWNED},pods", "-l", f"{PART_OF}={self._study.name}", "-o", "json")
        found = list[Any](self._ask(*words)["items"])
        job_sets = {each["metadata"]["name"]: each for each in found if each["kind"] == "JobSet"}
        files: Mapping[str, Mapping[str, str]] = {}
        if self._watched:
            readers = [each for each in found if self._reads(each) and not _leaves(each)]
            if not any(_phase(each) == "Running" for each in readers):
                self._make_reader()
                raise LaunchFailed(f"pod {self._reader}, which reads the claim, does not run yet")
            files = self._read([self._run(number) for number in sorted(self._watched)])
        for number in self._watched:
            name = self.name(number)
            pods = [
                each
                for each in found
                if each["kind"] == "Pod"
                and each["metadata"].get("labels", {}).get(INSTANCE) == name
            ]
            own = files.get(self._run(number), {})
            self._views[number] = TrialView(now, job_sets.get(name), pods, own)
        self._sweep(job_sets, now)

    def _sweep(self, job_sets: Mapping[str, Object], now: float) -> None:
        """Deletes trials that have ended, and those without an owner, which a command that was
        killed has left."""
        watched = {self.name(number) for number in self._watched}
        for name, due in list(self._strays.items()):
            if due <= now and name not in watched:
                self.delete(f"{INSTANCE}={name}")
                del self._strays[name]
        left = [name for name, each in job_sets.items() if not _leaves(each)]
        strays = {name: now + STRAY_S for name in left if name not in watched}
        self._strays = {**strays, **{n: due for n, due in self._strays.items() if n in strays}}

    def _run(self, number: int) -> str:
        return self._directory.trial(number).name

    def _read(self, asked: Sequence[str]) -> dict[str, dict[str, str]]:
        program = Path(claim_files.__file__).read_text()
        root = f"{RUNS}/{self._study.name}"
        words = ("exec", self._reader, "--", "python3", "-c", program, root, *asked)
        return dict(self._ask(*words))

    def _ask(self, *words: str) -> Any:
        """Returns the document that a call prints. Raises LaunchFailed."""
        said = self.kubectl.run(*words, timeout_s=ASK_S)
        try:
            return json.loads(said)
        except ValueError:
            raise LaunchFailed(
                f"kubectl {words[0]} has printed {len(said)} characters that are no JSON, perhaps "
                "because the connection broke off"
            ) from None

    def _reads(self, each: Object) -> bool:
        return bool(each["kind"] == "Pod" and each["metadata"]["name"] == self._reader)

    def _readers(self) -> Sequence[Object]:
        found = self.kubectl.get("pod", self._reader)
        return [found] if found else []

    def _make_reader(self) -> None:
        """Makes the pod that reads the claim, unless it is there; again if it was lost."""
        for each in self._readers():
            if _phase(each) in ("Pending", "Running") and not _leaves(each):
                return
            # At once, since it writes nothing: on a node that is lost, it would never end.
            words = ("--ignore-not-found", "--force", "--grace-period=0")
            self.kubectl.run("delete", "pod", self._reader, *words)
        self.kubectl.apply([reading_pod(self._study, self._reader)])


def mirror(files: Mapping[str, str], run_dir: Path) -> None:
    """Writes what has changed of the files of a run to its directory on this machine. Raises
    OSError."""
    for name, content in files.items():
        path = run_dir / name
        if content and (not path.exists() or path.read_text() != content):
            replace_text(path, content)
