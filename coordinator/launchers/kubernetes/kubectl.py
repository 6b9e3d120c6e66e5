"""Submits a cluster to Kubernetes through ``kubectl``, and explains refusals in one line."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from coordinator.launchers.kubernetes.cluster import KubernetesCluster
from coordinator.launchers.kubernetes.job_set import RUN_DIR, Object, objects, secrets, to_yaml
from coordinator.launchers.kubernetes.policies import closing
from coordinator.launchers.kubernetes.starting import wait_started
from psrpc.core.errors import AlreadyExists, InvalidArgument, LaunchFailed

ANSWER_S = 60.0
"""How long a call of ``kubectl`` may take, except for the deletion of an ended run."""

DELETE_S = 180.0
"""How long the last pods of a run that has ended may take to leave."""

MANIFESTS = "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"

_APPLY = ("apply", "--server-side", "--force-conflicts", "--field-manager=coordinator", "-f", "-")
"""Applies on the server. Otherwise `kubectl` would keep a copy of each object in an annotation, and
annotations have room for 256 KiB."""

_ADVICE = (
    (
        r"failed calling webhook",
        "the JobSet controller does not run; see its pods: kubectl get pods -n jobset-system",
    ),
    (
        r'resource type "jobset|no matches for kind "JobSet',
        "the cluster has no JobSet; its "
        f"administrator installs it: kubectl apply --server-side -f {MANIFESTS}",
    ),
    (
        r'resource type "trainjob|no matches for kind "Train',
        "the cluster has no Kubeflow Trainer 2; "
        "its administrator installs it, or take `coordinator launch kubernetes`",
    ),
    (r"exceeded quota", "ask for less, or for a larger quota"),
    (
        r"pods/exec",
        "ask the cluster's administrator for a Role that may create pods/exec, by which a study "
        "reads what its trials write",
    ),
    (
        r"forbidden",
        "ask the cluster's administrator for a Role that may get, create, patch and "
        "delete jobsets, persistentvolumeclaims, configmaps, secrets and networkpolicies, and list "
        "pods",
    ),
    (r'namespaces "(.+?)" not found', r"make it: kubectl create namespace \1"),
    (
        r"field is immutable",
        "it exists with another value, which cannot change: choose another --name, or delete it",
    ),
    (r"provide credentials|Unauthorized", "log in to the cluster again"),
    (
        r'context was not found|context "|refused|no such host|timeout|Unable to connect',
        "`kubectl config get-contexts` says which clusters there are: --context NAME",
    ),
)
"""Advice for errors of ``kubectl``: a regular expression for the error, and the fix. The first
match counts."""

_LOGGED = re.compile(r"[IWE]\d{4} |Warning: ")
"""Beginnings of log lines and warnings, which are no part of a refusal."""


class Kubectl:
    """Calls ``kubectl`` for one cluster and namespace."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        """Calls will use the context and the namespace of ``cluster``."""
        said = ["kubectl"]
        if cluster.options.context:
            said += ["--context", cluster.options.context]
        if cluster.options.namespace:
            said += ["--namespace", cluster.options.namespace]
        self._command = said

    def run(self, *words: str, text: str = "", timeout_s: float = ANSWER_S) -> str:
        """Calls ``kubectl`` with ``text`` as standard input; returns its standard output.

        Raises:
            LaunchFailed: the call fails or takes too long; has the error and a fix.
        """
        command = [*self._command, *words]
        try:
            done = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                # Ctrl-C on a terminal is for this process alone, which may still need the answer.
                process_group=0,
            )
        except FileNotFoundError:
            raise LaunchFailed(
                "there is no kubectl here; install it, or see with --dry-run what would be "
                "submitted"
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchFailed(
                f"kubectl {words[0]} has not ended for {timeout_s:g} s; `kubectl cluster-info` "
                "says whether the cluster answers"
            ) from None
        if done.returncode:
            raise LaunchFailed(f"kubectl {words[0]}: {explained(done.stderr)}")
        return done.stdout

    def get(self, kind: str, name: str) -> Object | None:
        """Returns an object, or None if it does not exist. Raises LaunchFailed."""
        found = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        document: Object | None = json.loads(found) if found.strip() else None
        return document

    def apply(self, made: Sequence[Object], *words: str) -> None:
        """Makes objects, or changes them. Raises LaunchFailed."""
        self.run(*_APPLY, *words, text=to_yaml(made))


def explained(words: str) -> str:
    """Returns the error output ``words`` of ``kubectl`` in one line, with the fix if it is
    known."""
    lines = [line.removeprefix("error: ").strip() for line in words.splitlines()]
    why = "; ".join(line for line in lines if line and not _LOGGED.match(line))
    for sign, advice in _ADVICE:
        found = re.search(sign, why)
        if found:
            return f"{why}; {found.expand(advice)}"
    return why or "it fails without a word"


def submit_objects(cluster: KubernetesCluster) -> None:
    """Submits a cluster. First deletes the JobSet or TrainJob of the same run if it has ended.

    Raises:
        AlreadyExists: the cluster runs already, or another run has its name.
        InvalidArgument: a claim does not exist, or its volume is for one node alone.
        LaunchFailed: Kubernetes cannot be reached, or refuses the cluster, or a NetworkPolicy
            keeps its pods apart.
    """
    kubectl = Kubectl(cluster)
    if check_objects(cluster, kubectl):
        kubectl.run(
            "delete",
            cluster.resource,
            cluster.name,
            "--cascade=foreground",
            timeout_s=DELETE_S,
        )
    kubectl.apply([*secrets(cluster), *objects(cluster)])


def check_objects(cluster: KubernetesCluster, kubectl: Kubectl) -> bool:
    """Has Kubernetes try the objects of a cluster, of which it makes none; returns whether the same
    run is there and has ended. Raises as :func:`submit_objects` does."""
    ended = _check_run(cluster, kubectl.get(cluster.resource, cluster.name))
    _check_claim(cluster, kubectl)
    _check_ports(cluster, kubectl)
    # Leave out the last one if it exists from an ended run: Kubernetes would refuse to change its
    # immutable fields.
    rehearsed = [*secrets(cluster), *objects(cluster)[: -1 if ended else None]]
    kubectl.apply(rehearsed, "--dry-run=server")
    return ended


def wait_for_pods(cluster: KubernetesCluster) -> str:
    """Waits for the pods of a submitted cluster, for ``--wait`` seconds.

    Returns:
        Which pods do not run yet, and why; empty if all do.

    Raises:
        LaunchFailed: a pod cannot start without help (PS142), or the cluster does not answer.
    """
    kubectl = Kubectl(cluster)
    own = f"jobset.sigs.k8s.io/jobset-name={cluster.name}"

    def look() -> Sequence[Any]:
        pods: Any = json.loads(kubectl.run("get", "pods", "-l", own, "-o", "json"))
        return list(pods["items"])

    limit_s = cluster.options.wait
    if not limit_s:
        return ""
    return wait_started(look, cluster.plan.tasks, time.monotonic, time.sleep, limit_s)


def _check_run(cluster: KubernetesCluster, found: Object | None) -> bool:
    """Returns whether the object exists and its run has ended. Raises AlreadyExists if it runs, or
    belongs to another run."""
    if found is None:
        return False
    run_dir = found["metadata"].get("annotations", {}).get(RUN_DIR)
    own, named = str(cluster.plan.options.run_dir), f"the {cluster.kind} {cluster.name!r}"
    if run_dir != own:
        of = f"the run directory {run_dir!r}" if run_dir else "another application"
        raise AlreadyExists(f"{named} belongs to {of}; choose another name: --name NAME")
    status = found.get("status", {})
    conditions = [each for each in status.get("conditions", ()) if each.get("status") == "True"]
    if {each["type"] for each in conditions}.isdisjoint(("Completed", "Complete", "Failed")):
        raise AlreadyExists(
            f"{named} runs; see its pods: kubectl get pods -l "
            f"jobset.sigs.k8s.io/jobset-name={cluster.name}; end it: kubectl delete "
            f"{cluster.kind.lower()} {cluster.name}"
        )
    return True


def _check_claim(cluster: KubernetesCluster, kubectl: Kubectl) -> None:
    """Raises InvalidArgument where coordinator and shards would not see one run directory."""
    options = cluster.options
    for flag, name in (("--claim", options.claim), ("--data-claim", options.data_claim)):
        if name and kubectl.get("persistentvolumeclaim", name) is None:
            raise InvalidArgument(
                f"{flag} is {name!r}, and there is no such PersistentVolumeClaim; `kubectl get "
                "pvc` lists those that there are",
                code="PS143",
            )
    found: Any = kubectl.get("persistentvolumeclaim", cluster.claim)
    modes = found["spec"]["accessModes"] if found else [options.access_mode]
    if options.access_mode not in modes:
        raise InvalidArgument(
            f"the claim {cluster.claim!r} allows {', '.join(modes)}, so pods of other nodes would "
            "not see the run directory; take a claim of a shared file system with ReadWriteMany, "
            "or say --access-mode ReadWriteOnce on a cluster of one node",
            code="PS143",
        )


def _check_ports(cluster: KubernetesCluster, kubectl: Kubectl) -> None:
    """Raises LaunchFailed where pods of the cluster could not call each other."""
    try:
        found: Any = json.loads(kubectl.run("get", "networkpolicies", "-o", "json"))
    except LaunchFailed:
        # Not everybody may list them. What else is wrong, the next call says.
        return
    port = cluster.inside.port
    if closed := closing(found["items"], cluster.labels, port):
        own = ",".join(f"{name}={value}" for name, value in cluster.labels.items())
        raise LaunchFailed(
            f"NetworkPolicy {', '.join(closed)} closes port {port} between the pods of the "
            f"cluster; have its administrator allow egress to pods with {own}"
        )
