"""The controllers behind :mod:`tests.launchers.api_server`: they run what ``kubectl`` has applied.

A JobSet is played by :class:`tests.launchers.podman_engine.PodmanCluster`, a TrainJob as the JobSet
that Kubeflow Trainer makes of it, and a pod of its own by podman alone.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from tests.launchers.api_server import ApiServer
from tests.launchers.podman import LIMIT_S, environment_of, podman, podman_log
from tests.launchers.podman_engine import Ended, PodmanCluster

_CONDITIONS = {"completed": ("Completed", "Complete"), "failed": ("Failed", "Failed")}
"""The conditions that tell a JobSet and a TrainJob of their end."""

_ROLE = "jobset.sigs.k8s.io/replicatedjob-name"


@dataclass
class Controllers:
    """Runs the clusters and pods of one API server. ``folder`` is the engine's.

    Attributes:
        clusters: by the path of the JobSet or TrainJob.
    """

    server: ApiServer
    folder: Path
    files: Path
    network: str
    clusters: dict[str, PodmanCluster] = field(default_factory=dict)
    _own: dict[str, str] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)

    def of(self, end: str) -> PodmanCluster:
        """Returns the cluster whose name ends with ``end``."""
        [found] = [each for each in self.clusters.values() if each.name.endswith(end)]
        return found

    def applied(self, path: str) -> None:
        """Starts what an object asks for."""
        document = self.server.objects[path]
        if document["kind"] == "JobSet":
            self._start(path, document)
        elif document["kind"] == "TrainJob":
            self._start(path, self._job_set_of(path, document))
        elif document["kind"] == "Job":
            [cluster] = [each for each in self.clusters.values() if path in self._jobs(each)]
            cluster.scale(self._jobs(cluster)[path], document["spec"]["completions"])
        elif document["kind"] == "Pod":
            file = self.files / f"{document['metadata']['name']}.yaml"
            maps = [each for each in self.server.objects.values() if each["kind"] == "ConfigMap"]
            file.write_text(yaml.safe_dump_all([*maps, document]))
            podman(self.folder, "kube", "play", "--quiet", str(file))
            [container] = document["spec"]["containers"]
            self._own[path] = f"{document['metadata']['name']}-{container['name']}"

    def deleted(self, path: str) -> None:
        """Ends a pod as an eviction does, or all of a cluster's; a JobSet stays until they have."""
        if path in self.clusters:
            leaving = self.clusters[path].job_set
            leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.server.objects[path] = leaving
            self._in_thread(self._drain, path, self.clusters[path])
        for cluster in self.clusters.values():
            for role, index, name in cluster.pods():
                if path.endswith(f"/pods/{name}"):
                    self._in_thread(cluster.stop, role, index)
        if path in self._own:
            podman(self.folder, "pod", "rm", "-f", "-t", "0", path.rpartition("/")[2])
            del self._own[path]

    def pods(self) -> dict[str, Any]:
        """Returns the pods of all clusters, by path."""
        status = {"phase": "Running"}
        found = {path: {**self.server.objects[path], "status": status} for path in self._own}
        for path, cluster in self.clusters.items():
            namespace = path.split("/namespaces/")[1].split("/")[0]
            container = {"image": "", "state": {"running": {}}, "started": True}
            serving = {"phase": "Running", "containerStatuses": [container]}
            running = [(*each, serving) for each in cluster.pods()]
            ended = [(e.role, e.index, e.pod, _status_of(e)) for e in list(cluster.ended)]
            for role, index, name, status in running + ended:
                template = cluster.template(role)
                labels = {
                    **template["metadata"]["labels"],
                    "jobset.sigs.k8s.io/jobset-name": cluster.name,
                    _ROLE: role,
                    "batch.kubernetes.io/job-completion-index": str(index),
                }
                found[f"api/v1/namespaces/{namespace}/pods/{name}"] = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": name, "namespace": namespace, "labels": labels},
                    "spec": template["spec"],
                    "status": status,
                }
        return found

    def log(self, path: str) -> str:
        """Returns the log of a pod that is there, or has ended."""
        name = path.rpartition("/")[2]
        for file in self.files.glob(f"*/{name}.log"):
            return file.read_text()
        [container] = self.pods()[path]["spec"]["containers"]
        return podman_log(self.folder, f"{path.rpartition('/')[2]}-{container['name']}").decode()

    def executed(self, path: str, command: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Runs a command in a pod; returns its exit code and what it has printed."""
        [container] = self.pods()[path]["spec"]["containers"]
        name = f"{path.rpartition('/')[2]}-{container['name']}"
        done = subprocess.run(
            ["podman", "exec", name, *command],
            env=environment_of(self.folder),
            capture_output=True,
            timeout=LIMIT_S,
        )
        return done.returncode, done.stdout, done.stderr

    def end(self) -> None:
        """Removes all that is left."""
        for path in list(self._own):
            self.deleted(path)
        for cluster in self.clusters.values():
            cluster.delete()
        for thread in self._threads:
            thread.join()
        for each in self.server.objects.values():
            if each["kind"] == "PersistentVolumeClaim":
                # Podman has made it, for a pod that mounts a claim of no cluster.
                words = ["podman", "volume", "rm", "-f", each["metadata"]["name"]]
                subprocess.run(words, env=environment_of(self.folder), capture_output=True)

    def _start(self, path: str, job_set: Any) -> None:
        instance = job_set["metadata"]["labels"]["app.kubernetes.io/instance"]
        others = [
            each
            for each in self.server.objects.values()
            if each["kind"] in ("ConfigMap", "PersistentVolumeClaim", "Secret")
            and each["metadata"]["labels"]["app.kubernetes.io/instance"] == instance
        ]
        files = self.files / f"{instance}-{token_hex(3)}"
        files.mkdir()
        cluster = PodmanCluster(self.folder, files, [*others, job_set], self.network)
        self.clusters[path] = cluster
        for job, role in self._jobs(cluster).items():
            name = job.rpartition("/")[2]
            labels = {"jobset.sigs.k8s.io/jobset-name": cluster.name, _ROLE: role}
            spec = {**cluster.job(role), "selector": {"matchLabels": labels}}
            metadata = {"name": name, "namespace": job.split("/")[4]}
            made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
            self.server.objects[job] = {**made, "spec": spec}
        cluster.start()
        self._in_thread(self._note_end, path, cluster)

    def _jobs(self, cluster: PodmanCluster) -> dict[str, str]:
        """Returns the roles of a cluster, by the paths of their Jobs."""
        [path] = [path for path, each in self.clusters.items() if each is cluster]
        namespace = path.split("/namespaces/")[1].split("/")[0]
        roles = [each["name"] for each in cluster.job_set["spec"]["replicatedJobs"]]
        of = f"apis/batch/v1/namespaces/{namespace}/jobs"
        return {f"{of}/{cluster.name}-{role}-0": role for role in roles}

    def _drain(self, path: str, cluster: PodmanCluster) -> None:
        cluster.drain()
        # Another one of the same name may not be made before.
        self.server.objects.pop(path)
        for job in self._jobs(cluster):
            self.server.objects.pop(job)
        del self.clusters[path]

    def _note_end(self, path: str, cluster: PodmanCluster) -> None:
        state = cluster.wait()
        if path in self.server.objects and state in _CONDITIONS:
            document = self.server.objects[path]
            said = _CONDITIONS[state][document["kind"] == "TrainJob"]
            document["status"] = {"conditions": [{"type": said, "status": "True"}]}

    def _job_set_of(self, path: str, train_job: Any) -> Any:
        """Returns what Kubeflow Trainer makes of a TrainJob: the JobSet of its runtime, with the
        number of pods that the TrainJob asks for in the Job that is the trainer."""
        spec = train_job["spec"]
        of = path.rpartition("/trainjobs/")[0]
        runtime = self.server.objects[f"{of}/trainingruntimes/{spec['runtimeRef']['name']}"]
        made = json.loads(json.dumps(runtime["spec"]["template"]["spec"]))
        for each in made["replicatedJobs"]:
            labels = each["template"].get("metadata", {}).get("labels", {})
            if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
                count = spec["trainer"]["numNodes"]
                each["template"]["spec"] |= {"completions": count, "parallelism": count}
        return {"kind": "JobSet", "metadata": train_job["metadata"], "spec": made}

    def _in_thread(self, act: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


def _status_of(ended: Ended) -> Any:
    state = {"terminated": {"exitCode": ended.code, "finishedAt": ended.at}}
    phase = "Failed" if ended.code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"image": "", "state": state}]}


@contextmanager
def controlled(server: ApiServer, folder: Path, files: Path, network: str) -> Iterator[Controllers]:
    """Runs controllers for a server."""
    made = Controllers(server, folder, files, network)
    server.applied, server.deleted = made.applied, made.deleted
    server.pods, server.log, server.executed = made.pods, made.log, made.executed
    try:
        yield made
    finally:
        made.end()
