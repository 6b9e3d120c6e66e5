"""A cluster as a JobSet, or as a TrainJob of Kubeflow, with the objects that it needs."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from coordinator.launchers.kubernetes.cluster import TOKEN, KubernetesCluster
from coordinator.launchers.kubernetes.pods import job_template
from psrpc.core.errors import InvalidJob
from psrpc.ops.extras import missing
from psrpc.security.identity import Role

Object = dict[str, Any]
"""An object of Kubernetes in the form of JSON."""

MOST_JOB_BYTES = 1_000_000
"""Longest job file: a ConfigMap has 1 MiB at most, including its metadata."""

RUN_DIR = "tf-pserver/run-dir"
"""Annotation of the JobSet or TrainJob that tells runs of the same name apart. Load-bearing."""

_KEY = re.compile(r"[-._a-zA-Z0-9]+")


def objects(cluster: KubernetesCluster) -> list[Object]:
    """Returns all objects except the Secrets, in the order in which they are made.

    Raises:
        InvalidJob: a ConfigMap cannot hold the job file; says what to do.
    """
    found = [] if cluster.options.claim else [claim(cluster)]
    if cluster.job_file:
        found.append(_job_file(cluster, cluster.job_file))
    return [
        *found,
        _policy(cluster),
        *(_train_job(cluster) if cluster.kubeflow else _job_set(cluster)),
    ]


def secrets(cluster: KubernetesCluster) -> list[Object]:
    """Returns a Secret for each role, with the key of this role alone; that of workers which host
    parameters has a shard's, too. None without certificates.

    Raises:
        InvalidArgument: a file is missing, or others may read it.
    """
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(cluster, cluster.secret(role)),
            "type": "Opaque",
            "data": {
                name: base64.b64encode(_read(path)).decode()
                for name, path in secret_files(cluster, role).items()
            },
        }
        for role in (cluster.roles if cluster.plan.options.certs else ())
    ]


def secret_files(cluster: KubernetesCluster, role: Role) -> dict[str, Path]:
    """Returns the files of a role's Secret, by their names in it."""
    from psrpc.security.certificates import CA_CERTIFICATE, certificate_name, key_name
    from psrpc.security.revocation import CRL

    certs, token = cluster.plan.options.certs, cluster.plan.options.token_file
    assert certs is not None
    names = [CA_CERTIFICATE]
    own = [role] if role.serves or token is None else []
    if role is Role.WORKER and cluster.hosted:
        own.append(Role.SHARD)
    for each in own:
        names += [certificate_name(each), key_name(each)]
    if (certs / CRL).exists():
        names.append(CRL)
    found = {name: certs / name for name in names}
    return found if token is None else {**found, TOKEN: token}


def printed(cluster: KubernetesCluster) -> str:
    """Returns the manifest of all objects except the Secrets; a comment has the commands that make
    those.

    Raises:
        InvalidJob: a ConfigMap cannot hold the job file, or PyYAML is not installed.
    """
    said = [f"# A {cluster.kind}, made by `coordinator launch`, which submits it."]
    if cluster.secured:
        said.append("# Keys are not in it; before  kubectl apply --server-side -f FILE  make:")
    for role in cluster.roles if cluster.secured else ():
        files = [f"--from-file={name}={path}" for name, path in secret_files(cluster, role).items()]
        words = ["kubectl", "create", "secret", "generic", cluster.secret(role), *files]
        # Replaces an existing Secret, with older certificates.
        words += ["--dry-run=client", "-o", "yaml"]
        said.append(f"#   {shlex.join(words)} | kubectl apply --server-side -f -")
    return "\n".join([*said, to_yaml(objects(cluster))])


def to_yaml(found: Sequence[Object]) -> str:
    """Returns a YAML document for each object; text of several lines, such as a job file, keeps its
    lines.

    Raises:
        InvalidJob: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise missing("launch kubernetes", "PyYAML", "kubernetes") from None

    # Write out values that several objects share, in place of references such as "&id001".
    readable: Any = type("Readable", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    readable.add_representer(str, text)
    return str(yaml.dump_all(found, Dumper=readable, sort_keys=False, width=120))


def _metadata(cluster: KubernetesCluster, name: str) -> Object:
    return {"name": name, "labels": cluster.labels}


def claim(cluster: KubernetesCluster) -> Object:
    """Returns the claim for the runs."""
    options = cluster.options
    spec: Object = {
        "accessModes": [options.access_mode],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(cluster, cluster.claim),
        "spec": spec,
    }


def _job_file(cluster: KubernetesCluster, name: str) -> Object:
    path = cluster.plan.job
    content = path.read_bytes()
    otherwise = "put it into the image: --in-image"
    if len(content) > MOST_JOB_BYTES:
        raise InvalidJob(
            f"{str(path)!r} has {len(content)} bytes; a ConfigMap has {MOST_JOB_BYTES}; {otherwise}"
        )
    if not _KEY.fullmatch(path.name):
        raise InvalidJob(
            f"{path.name!r} is no name in a ConfigMap: letters, digits, '.', '_' and '-'; rename "
            f"it, or {otherwise}"
        )
    try:
        data = {"data": {path.name: content.decode()}}
    except UnicodeDecodeError:
        data = {"binaryData": {path.name: base64.b64encode(content).decode()}}
    metadata = _metadata(cluster, name)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **data}


def _policy(cluster: KubernetesCluster) -> Object:
    own = {"podSelector": {"matchLabels": cluster.labels}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(cluster, cluster.name),
        "spec": {
            **own,
            "policyTypes": ["Ingress"],
            # Pods of the cluster reach all ports: shards take any free one for tensors.
            "ingress": [{"from": [own]}, {"ports": [{"port": "metrics"}]}],
        },
    }


def _job_set(cluster: KubernetesCluster) -> list[Object]:
    version = "jobset.x-k8s.io/v1alpha2"
    return [
        {"apiVersion": version, "kind": "JobSet", **_run(cluster), "spec": _spec(cluster)},
    ]


def _train_job(cluster: KubernetesCluster) -> list[Object]:
    """Returns the TrainingRuntime, which has the spec of the JobSet, and the TrainJob that uses
    it."""
    version, workers = "trainer.kubeflow.org/v1alpha1", {"numNodes": cluster.plan.options.workers}
    runtime = _metadata(cluster, cluster.name)
    runtime["labels"] = {**cluster.labels, "trainer.kubeflow.org/framework": "tf-pserver"}
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": cluster.name,
    }
    return [
        {
            "apiVersion": version,
            "kind": "TrainingRuntime",
            "metadata": runtime,
            "spec": {"mlPolicy": workers, "template": {"spec": _spec(cluster)}},
        },
        {
            "apiVersion": version,
            "kind": "TrainJob",
            **_run(cluster),
            "spec": {"runtimeRef": reference, "trainer": workers},
        },
    ]


def _run(cluster: KubernetesCluster) -> Object:
    annotations = {RUN_DIR: str(PurePosixPath(cluster.plan.options.run_dir))}
    return {"metadata": {**_metadata(cluster, cluster.name), "annotations": annotations}}


def _spec(cluster: KubernetesCluster) -> Object:
    """Returns the spec of the JobSet."""
    return {
        # Processes find each other before they are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {
            "operator": "All",
            "targetReplicatedJobs": [cluster.job(Role.COORDINATOR)],
        },
        # Jobs replace single pods. By default, a failed Job would restart all Jobs.
        "failurePolicy": {
            "maxRestarts": 0,
            "rules": [{"name": "neverRestartAll", "action": "FailJobSet"}],
        },
        "replicatedJobs": [
            {"name": cluster.job(role), "replicas": 1, "template": job_template(role, cluster)}
            for role in cluster.roles
        ],
    }


def _read(path: Path) -> bytes:
    from psrpc.security.certificates import read_pem_file, read_secret

    return read_secret(path) if path.suffix in (".key", "") else read_pem_file(path)
