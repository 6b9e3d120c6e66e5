"""Trials on Kubernetes: each is a JobSet, as of ``coordinator launch kubernetes``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coordinator.core.lifecycle import STOPPED
from coordinator.launchers.kubernetes.cluster import INSTANCE, KubernetesCluster, KubernetesOptions
from coordinator.launchers.kubernetes.job_set import objects
from coordinator.launchers.kubernetes.job_set import secrets as secrets_of
from coordinator.launchers.kubernetes.kubectl import Kubectl, check_objects
from coordinator.launchers.kubernetes.starting import seen
from coordinator.search.points import Point
from coordinator.studies.trial_clusters import TrialClusters, clusters_of, pod_options
from coordinator.studies.trial_pods import TrialPods, TrialView, culprit, mirror
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.engine import Launcher, LauncherOf
from coordinator.tune.options import TuneArguments
from coordinator.tune.trial_run import RunEnd, TrialRun, make_trial_directory
from psrpc.core.errors import LaunchFailed
from psrpc.core.names import SUMMARY
from psrpc.files.run_paths import read_ending
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

ASK_AGAIN_S = 5.0
"""Pause before a request that has not been obeyed is repeated."""

SUBMIT_S = 300.0
"""How long Kubernetes may refuse a trial, before the study ends."""


class KubernetesTrial:
    """A `TrialRun` as a JobSet, which goes on without the command. Its history and its summary are
    copied to the run directory on this machine; checkpoints and logs stay in the claim."""

    def __init__(
        self,
        number: int,
        cluster: KubernetesCluster,
        run_dir: Path,
        pods: TrialPods,
        note: Callable[[str], object],
    ) -> None:
        """``note`` gets lines for the user."""
        self._number, self._cluster, self._run_dir = number, cluster, run_dir
        self._pods = pods
        self._note = note
        self._wish: Literal["", "stop", "end early"] = ""
        self._asked_at = self._refused_since = self._submitted_at = 0.0
        self._owned = False
        self._failed = ""
        self._warned = self._refused = False
        self._summary_before: Mapping[str, Any] = {}
        self._end: RunEnd | None = None

    def start(self) -> None:
        """See :class:`TrialRun`; takes over a JobSet that is there already."""
        if read_ending(self._run_dir).get("phase") == "done":
            self._end = RunEnd(DONE, "")
            return
        self._pods.watch(self._number)

    def stop(self) -> None:
        """See :class:`TrialRun`. After a second call, the JobSet drains without the command."""
        if self._wish == "stop":
            self._finish(RunEnd(INTERRUPTED, ""))
            return
        self._wish, self._asked_at = "stop", 0.0

    def end_early(self) -> None:
        """See :class:`TrialRun`."""
        self._wish, self._asked_at = "end early", 0.0

    def look(self) -> RunEnd | None:
        """See :class:`TrialRun`. Raises LaunchFailed if Kubernetes refuses the trial for long."""
        if self._end is not None:
            return self._end
        view = self._pods.view(self._number)
        if view is None or view.at < self._submitted_at:
            return None
        mirror({k: v for k, v in view.files.items() if k != SUMMARY}, self._run_dir)
        if view.state == "runs":
            self._owned = True
            self._look_at_pods(view)
            self._look_at_summary(view)
            self._urge(view)
        elif view.state != "leaves":
            self._settle(view)
        return self._end

    def _settle(self, view: TrialView) -> None:
        """Ends the trial, or starts it, with the JobSet over or absent."""
        summary = view.summary
        if summary.get("phase") == "done":
            mirror(view.files, self._run_dir)
            with suppress(LaunchFailed, OSError):
                # Without them, TensorBoard lacks the curves of this trial.
                self._pods.curves(self._number, self._run_dir / "tensorboard")
            self._finish(RunEnd(DONE, ""))
        elif self._wish == "stop":
            self._finish(RunEnd(INTERRUPTED, ""))
        elif self._failed:
            mirror(view.files, self._run_dir)
            self._finish(RunEnd(FAILED, self._failed))
        elif view.state != "absent":
            mirror(view.files, self._run_dir)
            self._finish(self._failure(view))
        elif self._owned:
            self._note(f"trial {self._number}: its JobSet {self._cluster.name} was deleted")
            self._finish(RunEnd(INTERRUPTED, ""))
        else:
            self._submit(view)

    def _look_at_summary(self, view: TrialView) -> None:
        """Ends a run that has failed: its Job would start the coordinator again, as after a crash,
        to fail in the same way."""
        summary = view.summary
        if summary.get("phase") == "failed" and summary != self._summary_before:
            reason = str(summary.get("reason") or "")
            # The coordinator that a user has stopped is not started again.
            self._failed = self._failed or ("" if reason == STOPPED else reason)

    def _failure(self, view: TrialView) -> RunEnd:
        summary = view.summary if view.summary != self._summary_before else {}
        if reason := str(summary.get("reason") or ""):
            return RunEnd(INTERRUPTED if reason == STOPPED else FAILED, reason)
        pod, how = culprit(view.pods)
        if not pod:
            return RunEnd(
                FAILED, f"JobSet {self._cluster.name} has {view.state}, and no pod says why"
            )
        line = self._pods.last_line(pod)
        return RunEnd(FAILED, f"pod {pod} {how}" + (f": {line}" if line else ""))

    def _submit(self, view: TrialView) -> None:
        now = time.monotonic()
        if now - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = now
        self._summary_before = view.summary
        try:
            self._pods.kubectl.apply([*secrets_of(self._cluster), *objects(self._cluster)])
        except LaunchFailed as error:
            self._refused_since = self._refused_since or now
            if now - self._refused_since > SUBMIT_S:
                raise
            if self._refused_since == now:
                self._note(f"warning: trial {self._number} is not accepted yet: {error}")
            return
        self._owned, self._asked_at, self._submitted_at = True, 0.0, time.monotonic()

    def _urge(self, view: TrialView) -> None:
        """Asks the run to end if the study wants that, until it is obeyed."""
        now = time.monotonic()
        if not (self._wish or self._failed) or now - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = now
        try:
            if self._wish != "end early" or self._failed:
                self._pods.delete(f"{INSTANCE}={self._cluster.name}", beside=False)
            elif view.coordinator:
                words = ("exec", view.coordinator, "--", "sh", "-c", "kill -USR1 1")
                self._pods.kubectl.run(*words)
        except LaunchFailed as error:
            if not self._refused:
                self._note(f"warning: trial {self._number} cannot be ended: {error}; asking again")
            self._refused = True

    def _look_at_pods(self, view: TrialView) -> None:
        if self._failed or view.files.get("history.csv"):
            return
        start = seen(view.pods, self._cluster.plan.tasks)
        self._failed = start.hopeless
        waited = self._submitted_at and view.at - self._submitted_at > self._cluster.options.wait
        if start.missing and waited and not self._warned:
            self._warned = True
            self._note(f"trial {self._number}: {'; '.join(start.missing)}")

    def _finish(self, end: RunEnd) -> None:
        self._end = end
        self._pods.forget(self._number)

    @property
    def dashboard(self) -> str:
        """See :class:`TrialRun`: empty, since pods have addresses of their own."""
        return ""

    @property
    def status(self) -> GetJobStatusResponse:
        """See :class:`TrialRun`: empty, for the same reason."""
        return GetJobStatusResponse()


@dataclass
class KubernetesStudy:
    """Makes the launchers of a study, and removes what is left at its end."""

    job: Path
    options: TuneArguments
    pods: KubernetesOptions
    opened: list[TrialPods] = field(default_factory=list)

    def launcher(self, directory: StudyDirectory, note: Callable[[str], object]) -> Launcher:
        """See :data:`coordinator.tune.command.LauncherOf`. Raises PsError or OSError."""
        clusters = clusters_of(self.job, self.options, self.pods, directory)
        kubectl = Kubectl(clusters.study)
        pods = TrialPods(clusters.study, directory, kubectl, note)
        self.opened.append(pods)
        where = f"{clusters.runs} of the claim {clusters.claim}"
        note(f"the trials write to {where}; starting a pod that reads it")
        pods.open()

        def launch(number: int, point: Point, _slot: int) -> tuple[TrialRun, Path]:
            run_dir = directory.trial(number)
            make_trial_directory(run_dir, point)
            cluster = clusters.cluster(number, point)
            return KubernetesTrial(number, cluster, run_dir, pods, note), run_dir

        return launch


@contextmanager
def kubernetes_trials(job: str, options: TuneArguments) -> Iterator[LauncherOf]:
    """Has Kubernetes check a trial; yields what makes launchers.

    Raises:
        InvalidArgument: an option cannot be used.
        LaunchFailed: Kubernetes cannot be reached, or would refuse the trials.
    """
    pods = pod_options(options)
    # Made for this question alone, and by the server not at all.
    tried = TrialClusters(Path(job), options, pods, "study-000000").cluster(0, {})
    if not pods.claim:
        tried = replace(tried, options=replace(tried.options, claim=None))
    check_objects(tried, Kubectl(tried))
    study = KubernetesStudy(Path(job), options, pods)
    try:
        yield study.launcher
    finally:
        for each in study.opened:
            with suppress(LaunchFailed):
                each.close()
