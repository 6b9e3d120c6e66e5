"""The clusters of a study on Kubernetes, from the options of ``coordinator tune``."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coordinator.launchers.kubernetes.cluster import (
    RUNS,
    KubernetesCluster,
    KubernetesOptions,
    name_like,
)
from coordinator.launchers.plan import ClusterOptions, LaunchPlan, plan_of
from coordinator.search.points import Point, overrides_of
from coordinator.tune.directory import PLACE, StudyDirectory
from coordinator.tune.options import TuneArguments
from coordinator.tune.preparation import trial_overrides
from psrpc.core.errors import InvalidArgument
from psrpc.files.storage import replace_text
from psrpc.options.declaration import NotThis, options_of
from psrpc.options.security_options import certificates_directory, is_insecure, token_path

_OWN = {"image", "in_image", "name", "restarts"}
"""Options of the launcher that a study has by itself."""

_LOCAL = (
    "data_connections",
    "devices",
    "gpu_memory_fraction",
    "intra_op_threads",
    "log_format",
    "shm",
    "slow_down",
    "step_times",
    "trace",
    "warm_start",
)
"""Options of a cluster on one machine that pods do not take."""


def pod_options(options: TuneArguments) -> KubernetesOptions:
    """Returns the launcher's options of each trial. Raises InvalidArgument."""
    for name in _LOCAL:
        if getattr(options, name) != getattr(TuneArguments, name):
            flag = name.replace("_", "-")
            raise InvalidArgument(f"--{flag} is not for trials on Kubernetes; leave it out")
    if not options.image:
        raise InvalidArgument("--image is missing: name an image that docker/Dockerfile makes")
    declared = {each.name: each for each in options_of(KubernetesOptions) if each.name not in _OWN}
    said: dict[str, Any] = {}
    for text in options.kubernetes:
        name, equals, value = (each.strip() for each in text.partition("="))
        name = name.replace("-", "_")
        if name == "in_image":
            raise InvalidArgument(
                "--kubernetes in_image: a study reads the job file here, and a ConfigMap brings it "
                "to the pods; put the modules that it imports into the image, and leave it out"
            )
        if name not in declared or not equals:
            near = get_close_matches(name, declared, 1)
            advice = f"did you mean {near[0]}=...?" if near else f"it has {', '.join(declared)}"
            raise InvalidArgument(f"--kubernetes is {text!r}; expected NAME=VALUE: {advice}")
        try:
            said[name] = declared[name].from_text(value)
        except NotThis as expected:
            raise InvalidArgument(
                f"--kubernetes {name} is {value!r}; expected {expected}"
            ) from None
    return KubernetesOptions(**said, image=options.image, restarts=options.max_restarts)


@dataclass(frozen=True)
class TrialClusters:
    """Describes the clusters of a study.

    Attributes:
        name: of the study in Kubernetes, which its objects and its directory in the claim have.
    """

    job: Path
    options: TuneArguments
    pods: KubernetesOptions
    name: str

    def cluster(self, number: int, point: Point) -> KubernetesCluster:
        """Returns the cluster of a trial. Raises PsError."""
        overrides = (*trial_overrides(self.options), *overrides_of(point))
        pods = replace(self.pods, name=f"{self.name}-{number}", claim=self.pods.claim or self.claim)
        plan = self._plan(Path(self.name, f"trial-{number:04d}"), overrides)
        return KubernetesCluster(plan, pods, part_of=self.name)

    @property
    def study(self) -> KubernetesCluster:
        """A cluster that is never started, and has what all trials share: the claim."""
        plan = self._plan(Path(self.name), ())
        pods = replace(self.pods, name=self.name)
        return KubernetesCluster(plan, pods, part_of=self.name)

    @property
    def runs(self) -> str:
        """The directory of the study in its pods."""
        return f"{RUNS}/{self.name}"

    @property
    def claim(self) -> str:
        """The claim that has the run directories of all trials."""
        return self.study.claim

    def _plan(self, run_dir: Path, overrides: tuple[str, ...]) -> LaunchPlan:
        options = self.options
        said: dict[str, Any] = {
            each: getattr(options, each)
            for each in ("shards", "workers", "mode", "replicas", "gpu")
        }
        if options.connect_timeout_s != TuneArguments.connect_timeout_s:
            said["connect_timeout_s"] = options.connect_timeout_s
        given = ClusterOptions(
            **said,
            run_dir=run_dir,
            overrides=overrides,
            certs=certificates_directory(options),
            token_file=token_path(options),
            insecure=is_insecure(options),
        )
        return plan_of(self.job, given)


def clusters_of(
    job: Path, options: TuneArguments, pods: KubernetesOptions, directory: StudyDirectory
) -> TrialClusters:
    """Returns the clusters of the study in a directory, which stores their name: no other study has
    it, so that none takes the runs of another for its own.

    Raises:
        InvalidArgument: the trials of the study are in another namespace or claim.
        OSError: the directory cannot be read or written.
    """
    path = directory.path / PLACE
    said = {"namespace": pods.namespace, "claim": pods.claim, "context": pods.context}
    try:
        known = json.loads(path.read_text())
    except FileNotFoundError:
        name = f"{name_like(directory.path.absolute().name, 24)}-{secrets.token_hex(3)}"
        made = TrialClusters(job, options, pods, name)
        place = {"name": name, "runs": made.runs, "volume": made.claim, **said}
        replace_text(path, json.dumps(place, indent=1) + "\n")
        return made
    for key, value in said.items():
        if known.get(key) != value:
            raise InvalidArgument(
                f"the study in {directory.path} has its trials in {key} {known.get(key)!r}, and "
                f"this command says {value!r}; say the same again: --kubernetes {key}=NAME"
            )
    return TrialClusters(job, options, pods, str(known["name"]))
