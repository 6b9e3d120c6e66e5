"""The pods of a cluster on Kubernetes, and the rules by which a Job replaces them."""

from __future__ import annotations

from typing import Any

from coordinator.launchers.kubernetes.cluster import (
    CERTS,
    DATA,
    JOBS,
    RUNS,
    TOKEN,
    KubernetesCluster,
)
from psrpc.security.identity import Role

METRICS_PORT = 9100

GRACE_S = 90
"""Seconds between SIGTERM and SIGKILL; a drain takes 75 s at most."""

REFUSED, DRAINED, STOPPED = 2, 75, 130
"""Exit codes that a Job tells apart; see docs/supervisors.md."""

_INDEX = "$(JOB_COMPLETION_INDEX)"
"""Stands for the index of a pod in its Job; Kubernetes replaces this text in arguments."""


def job_template(role: Role, cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns the Job of a role.

    A pod that fails is replaced, unless another start would fail in the same way. Then the Job
    fails, and the whole JobSet with it; but if there are several workers, the Job only gives up
    that one. Only the exit code of the coordinator can say that a user has stopped the run.
    """
    many = {Role.SHARD: cluster.plan.options.shards, Role.WORKER: cluster.plan.options.workers}
    final = [REFUSED, STOPPED] if role is Role.COORDINATOR else [REFUSED]
    passing = [DRAINED] if role is Role.COORDINATOR else [DRAINED, STOPPED]
    # Only workers may be lost for good, and not all of them. Their Job succeeds as soon as one of
    # them has heard that the run is done.
    end, bound = "FailJob", dict[str, Any](maxFailedIndexes=0)
    if role is Role.WORKER:
        # This gives up a barred worker, too: it exits with REFUSED.
        end, bound = "FailIndex", {"successPolicy": {"rules": [{"succeededCount": 1}]}}
    # By this label, Kubeflow finds the Job that it calls the trainer, and sets its number of pods.
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    metadata = {"metadata": {"labels": label}} if cluster.job(role) == "node" else {}
    return {
        **metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": many.get(role, 1),
            "parallelism": many.get(role, 1),
            # A pod's own crashes alone delay its restart: by 10 s at first, 10 minutes at most.
            "backoffLimitPerIndex": cluster.options.restarts,
            **bound,
            # Replace a pod only after it has ended, so that no two pods have the same index.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    _on_exit(end, cluster.job(role), final),
                    _on_exit("Ignore", cluster.job(role), passing),
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": _pod(role, cluster),
        },
    }


def _on_exit(action: str, container: str, codes: list[int]) -> dict[str, Any]:
    values = {"containerName": container, "operator": "In", "values": codes}
    return {"action": action, "onExitCodes": values}


def _pod(role: Role, cluster: KubernetesCluster) -> dict[str, Any]:
    scheme = "https" if cluster.secured else "http"
    spec: dict[str, Any] = {
        # Start another pod, not another container in this pod: only so a Job sees exit codes.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        # Otherwise a Service called pserver would set PSERVER_PORT in this pod.
        "enableServiceLinks": False,
        **_user(cluster),
        "containers": [_container(role, cluster)],
        "volumes": [volume for volume, _ in _volumes(role, cluster)],
    }
    return {
        "metadata": {
            "labels": {**cluster.labels, "app.kubernetes.io/component": str(role)},
            "annotations": {
                "prometheus.io/scrape": "true",
                "prometheus.io/scheme": scheme,
                "prometheus.io/port": str(METRICS_PORT),
                "prometheus.io/path": "/metrics",
            },
        },
        "spec": spec,
    }


def reading_pod(cluster: KubernetesCluster, name: str) -> dict[str, Any]:
    """Returns a pod that does nothing for a day. Commands in it read the files of the claim, also
    those of runs whose pods are gone."""
    runs, mount = _runs(cluster)
    container: dict[str, Any] = {
        "name": "files",
        "image": cluster.options.image,
        "command": ["sleep", "86400"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": _CONFINED,
        "volumeMounts": [mount],
    }
    if cluster.options.pull_policy:
        container["imagePullPolicy"] = cluster.options.pull_policy
    spec = {
        "restartPolicy": "Never",
        # `sleep` hears no SIGTERM, as the first process of its container.
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        **_user(cluster),
        "containers": [container],
        "volumes": [runs],
    }
    metadata = {"name": name, "labels": cluster.labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


_CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _user(cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns the fields of a pod that say as whom it runs, and with which password it pulls."""
    user = cluster.options.user
    found: dict[str, Any] = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            # Do not visit every file of a large volume at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }
    if cluster.options.pull_secret:
        found["imagePullSecrets"] = [{"name": cluster.options.pull_secret}]
    return found


def _runs(cluster: KubernetesCluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the volume with the runs, and its mount."""
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}}
    return claim, {"name": "runs", "mountPath": RUNS}


def _container(role: Role, cluster: KubernetesCluster) -> dict[str, Any]:
    port = cluster.inside.port
    ports = [{"name": "metrics", "containerPort": METRICS_PORT}]
    if role.serves:
        ports.insert(0, {"name": "grpc", "containerPort": port})
    found: dict[str, Any] = {
        "name": cluster.job(role),
        "image": cluster.options.image,
        "command": [_COMMANDS[role]],
        "args": _arguments(role, cluster),
        "ports": ports,
        "securityContext": _CONFINED,
        **_probes(role, cluster),
        "volumeMounts": [mount for _, mount in _volumes(role, cluster)],
    }
    if cluster.options.pull_policy:
        found["imagePullPolicy"] = cluster.options.pull_policy
    requests = {"cpu": cluster.options.cpus, "memory": cluster.options.memory}
    limits: dict[str, Any] = {"memory": cluster.options.memory}
    if role is Role.WORKER:
        limits["nvidia.com/gpu"] = cluster.options.gpus
    resources = {
        key: {name: value for name, value in values.items() if value is not None}
        for key, values in (("requests", requests), ("limits", limits))
    }
    if any(resources.values()):
        found["resources"] = {key: values for key, values in resources.items() if values}
    return found


_COMMANDS = {Role.COORDINATOR: "coordinator", Role.SHARD: "pserver", Role.WORKER: "worker"}


def _arguments(role: Role, cluster: KubernetesCluster) -> list[str]:
    port = cluster.inside.port
    coordinator = ["--coordinator", f"{cluster.host(Role.COORDINATOR, '0')}:{port}"]
    said = {
        Role.COORDINATOR: cluster.inside.coordinator,
        Role.SHARD: cluster.inside.shard,
        Role.WORKER: cluster.inside.worker,
    }[role]
    # Kubernetes would replace $(X) and $$ in arguments.
    found = [each.replace("$", "$$") for each in said]
    if role is Role.SHARD:
        found += ["--shard", _INDEX, "--advertise", f"{cluster.host(role, _INDEX)}:{port}"]
    if role.serves:
        found += ["--bind", f"0.0.0.0:{port}"]
    if role is not Role.COORDINATOR:
        found += coordinator
    if role is Role.WORKER:
        # Pods share no memory.
        found.append("--no-shm")
        if cluster.hosted:
            found += ["--advertise", cluster.host(role, _INDEX)]
    return [*found, "--metrics", f"0.0.0.0:{METRICS_PORT}"]


def _probes(role: Role, cluster: KubernetesCluster) -> dict[str, Any]:
    """Returns the probes for a container that has started, and for one that hangs. Each call is a
    Python process, so calls are rare. A container that waits for others or restores a checkpoint
    passes the probes."""
    port = cluster.inside.port if role.serves else METRICS_PORT
    host = "localhost" if role.serves else "0.0.0.0"
    command = [_COMMANDS[role], "healthcheck", f"{host}:{port}"]
    if cluster.secured:
        command += ["--certs", CERTS]
    if cluster.plan.options.token_file:
        command += ["--token-file", f"{CERTS}/{TOKEN}"]
    look = {"exec": {"command": command}, "timeoutSeconds": 10}
    return {
        "startupProbe": {**look, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**look, "periodSeconds": 30, "failureThreshold": 4},
    }


def _volumes(role: Role, cluster: KubernetesCluster) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the volumes of a pod, each with its mount."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),
        # By default a container has 64 MB of shared memory, too little for a job that loads data in
        # several processes.
        (
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "shm", "mountPath": "/dev/shm"},
        ),
    ]
    if cluster.serves(role):
        found.append(_runs(cluster))
    if cluster.job_file and role is not Role.SHARD:
        job = {"name": "job", "configMap": {"name": cluster.job_file}}
        found.append((job, {"name": "job", "mountPath": JOBS, "readOnly": True}))
    if cluster.options.data_claim and role is not Role.SHARD:
        source = {"claimName": cluster.options.data_claim, "readOnly": True}
        data = {"name": "data", "persistentVolumeClaim": source}
        found.append((data, {"name": "data", "mountPath": DATA, "readOnly": True}))
    if cluster.secured:
        # The files belong to root, and the group may read them. Processes refuse keys that
        # all users may read.
        secret = {"secretName": cluster.secret(role), "defaultMode": 0o440}
        found.append(
            (
                {"name": "certs", "secret": secret},
                {"name": "certs", "mountPath": CERTS, "readOnly": True},
            )
        )
    return found
