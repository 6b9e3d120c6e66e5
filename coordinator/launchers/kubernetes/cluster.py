"""A cluster for Kubernetes: its options, and the names that follow from them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from coordinator.launchers.plan import LaunchPlan
from psrpc.core.errors import InvalidArgument
from psrpc.options.declaration import duration_s, option, positive
from psrpc.options.job_source import setting_pair
from psrpc.security.identity import Role

RUNS, JOBS, CERTS, DATA = "/runs", "/job", "/certs", "/data"
"""Directories of a pod: the claim with the runs, the job file, certificates, and the claim with the
data."""

TOKEN = "token"
"""Name of the token file, beside the certificates."""

INSTANCE, PART_OF = "app.kubernetes.io/instance", "app.kubernetes.io/part-of"
"""Labels with the name of a cluster, and of what several clusters belong to."""

PORT = 5000
"""Default port of coordinator and shards. It may be the same, as each pod has its own address."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 63 - len("-coordinator-0-0-abcde")
"""Longest name of a cluster. Kubernetes extends it to the names of pods, which are host names and
have 63 characters at most."""

_IMAGE = re.compile(
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_CPUS = re.compile(r"\d+(\.\d+)?|\d+m")
_BYTES = re.compile(r"\d+(\.\d+)?([kMGTP]|[KMGTP]i)?")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of ``coordinator launch kubernetes`` beside those of every launcher."""

    image: str = option("the image of all processes, as docker/Dockerfile makes it", metavar="REF")
    in_image: bool = option(
        "JOB is a path in the image; default: a ConfigMap brings the file", default=False
    )
    name: str | None = option(
        "of the JobSet or TrainJob; default: the run directory's", None, metavar="NAME"
    )
    namespace: str | None = option("default: that of the context", None, metavar="NAME")
    context: str | None = option(
        "which cluster of the kubeconfig; default: the current", None, metavar="NAME"
    )
    claim: str | None = option(
        "a PersistentVolumeClaim that has the run directory; default: NAME-runs, which is made",
        None,
        metavar="NAME",
    )
    storage: str = option(
        "how much the made claim asks for; default: %(default)s", "10Gi", metavar="SIZE"
    )
    storage_class: str | None = option(
        "of the made claim; default: the cluster's", None, metavar="NAME"
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = option(
        "of the claim; ReadWriteOnce is enough on a cluster of one node; default: %(default)s",
        "ReadWriteMany",
    )
    data_claim: str | None = option(
        "a PersistentVolumeClaim that coordinator and workers have in /data, to read",
        None,
        metavar="NAME",
    )
    cpus: str | None = option("cores of each process: 2, 500m", None, metavar="N")
    memory: str | None = option("memory of each process: 4Gi", None, metavar="SIZE")
    gpus: int | None = option("GPUs of each worker", None, metavar="N", convert=positive)
    user: int = option(
        "the user and group that run it; default: %(default)s, the image's",
        10001,
        metavar="UID",
        convert=positive,
    )
    restarts: int = option(
        "how often each process may crash; default: %(default)s", 20, metavar="N", convert=positive
    )
    pull_policy: str | None = option(
        "when the image is pulled; default: always for :latest, else where it is missing",
        None,
        choices=("Always", "IfNotPresent", "Never"),
    )
    pull_secret: str | None = option("a Secret with the registry's password", None, metavar="NAME")
    wait: float = option(
        "how long to wait for the pods to start, and say why one does not; default: 60",
        60.0,
        metavar="SECONDS",
        convert=duration_s,
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for values that Kubernetes would refuse."""
        for name, form, example in (
            ("image", _IMAGE, "registry/team/tf-pserver-worker:1"),
            ("cpus", _CPUS, "2 or 500m"),
            ("memory", _BYTES, "4Gi"),
            ("storage", _BYTES, "10Gi"),
        ):
            value = getattr(self, name)
            if value is not None and not form.fullmatch(value):
                raise InvalidArgument(f"--{name} is {value!r}; expected a form like {example}")


def _says_allreduce(plan: LaunchPlan, *, in_image: bool) -> bool:
    """Whether the settings of a job say ``dense="allreduce"``, or else its file, where it is
    here."""
    settings = dict(map(setting_pair, plan.options.overrides))
    if in_image or "dense" in settings:
        return settings.get("dense") == "allreduce"
    calls = (n for n in ast.walk(ast.parse(plan.job.read_bytes())) if isinstance(n, ast.Call))
    found = (word.value for call in calls for word in call.keywords if word.arg == "dense")
    return any(isinstance(each, ast.Constant) and each.value == "allreduce" for each in found)


@dataclass(frozen=True)
class KubernetesCluster:
    """A cluster for Kubernetes; its run directory is a path within the claim.

    Attributes:
        plan: the plan from the user's options, with paths of this machine.
        kubeflow: whether to submit a TrainJob, from which Kubeflow Trainer makes the JobSet.
        part_of: a label of all its objects, by which those of several clusters are found.
    """

    plan: LaunchPlan
    options: KubernetesOptions
    kubeflow: bool = False
    part_of: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for names that Kubernetes refuses."""
        path = self.plan.options.run_dir
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise InvalidArgument(
                f"--run-dir is {str(path)!r}; expected a directory in the claim, such as "
                f"{path.name or 'first'}"
            )
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST:
            near = name_like(self.name, _LONGEST)
            raise InvalidArgument(
                f"the {self.kind} would be called {self.name!r}; expected {_LONGEST} letters a-z, "
                f"digits and dashes at most: --name {near}"
            )

    @cached_property
    def hosted(self) -> bool:
        """Whether workers host parameters (``dense="allreduce"``), as far as the options and the
        job file, where it is here, say it in so many words."""
        without_shards = self.plan.options.shards < 1
        return without_shards or _says_allreduce(self.plan, in_image=self.options.in_image)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of its pods; each is a replicated job of its own."""
        shards = (Role.SHARD,) if self.plan.options.shards else ()
        return (Role.COORDINATOR, *shards, Role.WORKER)

    def serves(self, role: Role) -> bool:
        """Whether pods of ``role`` serve others: they have a certificate for that, and the run."""
        return role.serves or (role is Role.WORKER and self.hosted)

    @property
    def name(self) -> str:
        """The name of the JobSet or TrainJob."""
        return self.options.name or self.plan.options.run_dir.name

    @property
    def kind(self) -> str:
        """The kind of the object that runs the cluster."""
        return "TrainJob" if self.kubeflow else "JobSet"

    @property
    def resource(self) -> str:
        """The name of this kind for ``kubectl``."""
        return "trainjob.trainer.kubeflow.org" if self.kubeflow else "jobset.jobset.x-k8s.io"

    @property
    def claim(self) -> str:
        """The claim that has the run directory."""
        return self.options.claim or f"{self.name}-runs"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all its objects."""
        own = {"app.kubernetes.io/name": "tf-pserver", INSTANCE: self.name}
        return {**own, PART_OF: self.part_of} if self.part_of else own

    @property
    def inside(self) -> LaunchPlan:
        """The same cluster with the paths that its pods see."""
        said, job = self.plan.options, self.plan.job
        certs, token = said.certs and Path(CERTS), said.token_file and Path(CERTS, TOKEN)
        inner = replace(
            said,
            run_dir=Path(RUNS) / said.run_dir,
            certs=certs,
            token_file=token,
            port=said.port or PORT,
        )
        return LaunchPlan(job if self.options.in_image else Path(JOBS) / job.name, inner)

    @property
    def job_file(self) -> str | None:
        """The ConfigMap that has the job file; None where the image has it."""
        return None if self.options.in_image else f"{self.name}-job"

    @property
    def secured(self) -> bool:
        """Whether there are certificates."""
        return self.plan.options.certs is not None

    def job(self, role: Role) -> str:
        """Returns the name of a role's Job in the set, and of its container."""
        return "node" if self.kubeflow and role is Role.WORKER else str(role)

    def secret(self, role: Role) -> str:
        """Returns the name of the Secret with a role's certificate."""
        return f"{self.name}-{role}"

    def host(self, role: Role, index: str) -> str:
        """Returns the host name of a pod; the pod that replaces it has the same."""
        return f"{self.name}-{self.job(role)}-0-{index}.{self.name}"


def name_like(text: str, longest: int) -> str:
    """Returns a name of at most ``longest`` characters that Kubernetes takes and that is like
    ``text``."""
    near = re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:longest]
    return near.strip("-") or "first"
