"""Kubernetes in small: what kubelet, the Job controller and JobSet do with a manifest, by podman.

`podman kube play` starts the pods. It knows neither Jobs nor JobSets, has no Secrets as volumes in
Debian's version, expands no variables in arguments and needs systemd for probes: these are done
here, from the manifest alone.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from tests.launchers.podman import LIMIT_S, environment_of, podman, podman_log

SECRET_MODE, SECRET_GROUP = 0o440, 10001
"""What the manifests ask for."""


@dataclass(frozen=True)
class Ended:
    """A pod that has ended, and what the Job's rules have made of it: ``success``, ``replaced``,
    ``removed``, ``lost`` or ``failed``."""

    role: str
    index: int
    code: int
    then: str
    pod: str = field(default="", compare=False)
    at: str = field(default="", compare=False)


@dataclass
class _Pod:
    name: str
    removed: bool = False
    runs: bool = False


@dataclass
class PodmanCluster:
    """Runs one manifest. Threads: one for each index of each Job; ``lock`` guards all lists.

    Attributes:
        folder: of the engine.
        files: where Secrets, manifests and logs of the pods are kept.
    """

    folder: Path
    files: Path
    documents: list[Any]
    network: str
    ended: list[Ended] = field(default_factory=list)
    state: str = "running"
    lock: threading.Lock = field(default_factory=threading.Lock)
    _pods: dict[tuple[str, int], _Pod] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    # podman 4.3 crashes on volumes that another call is just removing.
    _volumes: threading.Lock = field(default_factory=threading.Lock)

    @property
    def job_set(self) -> Any:
        """The JobSet of the manifest."""
        return next(each for each in self.documents if each["kind"] == "JobSet")

    @property
    def name(self) -> str:
        """The JobSet's name."""
        return str(self.job_set["metadata"]["name"])

    def start(self) -> None:
        """Makes the claim, and starts all pods."""
        for each in self.documents:
            if each["kind"] == "PersistentVolumeClaim":
                podman(self.folder, "volume", "create", each["metadata"]["name"])
            if each["kind"] == "Secret":
                self._write_secret(each["metadata"]["name"], each["data"])
        for each in self.job_set["spec"]["replicatedJobs"]:
            job = each["template"]["spec"]
            assert (job["completionMode"], each["replicas"]) == ("Indexed", 1)
            for index in range(job["completions"]):
                self._start(each["name"], index)

    def scale(self, role: str, count: int) -> None:
        """Does what a patch of completions and parallelism does: new pods, or fewer."""
        with self.lock:
            have = sorted(index for each, index in self._pods if each == role)
        for index in range(len(have), count):
            self._start(role, index)
        for index in have[count:]:
            self.stop(role, index, removed=True)

    def pods(self) -> list[tuple[str, int, str]]:
        """Returns role, index and name of all pods that run."""
        with self.lock:
            return [(*where, pod.name) for where, pod in self._pods.items() if pod.runs]

    def pod(self, role: str, index: int) -> str:
        """Returns the name of the pod that an index has now."""
        with self.lock:
            return self._pods[role, index].name

    def kill(self, role: str, index: int) -> None:
        """Kills the process of a pod."""
        words = ["inspect", "-f", "{{.State.Pid}}", f"{self.pod(role, index)}-{role}"]
        os.kill(int(podman(self.folder, *words)), 9)

    def stop(self, role: str, index: int, *, removed: bool = False) -> None:
        """Does what an eviction does: SIGTERM, and SIGKILL after the grace period."""
        with self.lock:
            pod = self._pods[role, index]
            pod.removed = removed
        grace = self.template(role)["spec"]["terminationGracePeriodSeconds"]
        podman(self.folder, "stop", "-t", str(grace), f"{pod.name}-{role}")

    def healthy(self, role: str, index: int) -> bool:
        """Runs the liveness probe of a pod, as kubelet does."""
        container = self.template(role)["spec"]["containers"][0]
        command = container["livenessProbe"]["exec"]["command"]
        words = ["podman", "exec", f"{self.pod(role, index)}-{role}", *command]
        done = subprocess.run(
            words, env=environment_of(self.folder), capture_output=True, timeout=LIMIT_S
        )
        return done.returncode == 0

    def wait(self) -> str:
        """Waits for all pods; returns how the JobSet has ended."""
        for each in self._threads:
            each.join(LIMIT_S * 3)
            assert not each.is_alive(), f"{each.name} does not end: {self.ended}"
        return self.state

    def drain(self) -> None:
        """Does what the deletion of the JobSet does: SIGTERM to all pods at once, and SIGKILL after
        the grace period."""
        with self.lock:
            self.state = "deleted"
        while any(each.is_alive() for each in self._threads):
            words = ["podman", "stop", "-i", "-t", "90"]
            stops = [
                subprocess.Popen(
                    [*words, f"{name}-{role}"],
                    env=environment_of(self.folder),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for role, _, name in self.pods()
            ]
            for stop in stops:
                stop.wait()
            for each in self._threads:
                # A pod that was just being made is stopped in the next round.
                each.join(1.0)
        self.delete()

    def delete(self) -> None:
        """Removes all that is left, the claim included."""
        with self.lock:
            self.state = "deleted"
        for pod in list(self._pods.values()):
            with self._volumes:
                podman(self.folder, "pod", "rm", "-i", "-f", "-t", "0", pod.name)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for each in self.documents:
            if each["kind"] == "PersistentVolumeClaim":
                podman(self.folder, "volume", "rm", "-f", each["metadata"]["name"])
            if each["kind"] == "ConfigMap":
                # Podman makes a volume of it once a pod mounts it.
                words = ["podman", "volume", "rm", "-f", each["metadata"]["name"]]
                subprocess.run(words, env=environment_of(self.folder), capture_output=True)

    @cached_property
    def runs(self) -> Path:
        """The folder of the claim."""
        claim = next(d for d in self.documents if d["kind"] == "PersistentVolumeClaim")
        name = claim["metadata"]["name"]
        words = ["volume", "inspect", name, "--format", "{{.Mountpoint}}"]
        return Path(podman(self.folder, *words))

    def template(self, role: str) -> Any:
        """Returns the template of a role's pods."""
        return self.job(role)["template"]

    def job(self, role: str) -> Any:
        """Returns the spec of a role's Job."""
        jobs = self.job_set["spec"]["replicatedJobs"]
        return next(each for each in jobs if each["name"] == role)["template"]["spec"]

    def _start(self, role: str, index: int) -> None:
        thread = threading.Thread(
            target=self._job_of, args=(role, index), name=f"{role}-{index}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _job_of(self, role: str, index: int) -> None:
        try:
            self._look_after(role, index)
        except AssertionError as error:
            with self.lock:
                self.state = f"broken: {error}"

    def _look_after(self, role: str, index: int) -> None:
        """The Job controller for one index: replaces its pod until it succeeds."""
        while True:
            pod = self._play(role, index)
            container = f"{pod.name}-{role}"
            code = int(podman(self.folder, "wait", container))
            with self.lock:
                pod.runs = False
                then = self._then(role, code, pod)
                at = datetime.now(UTC).isoformat()
                self.ended.append(Ended(role, index, code, then, pod.name, at))
            (self.files / f"{pod.name}.log").write_bytes(podman_log(self.folder, container))
            with self._volumes:
                podman(self.folder, "pod", "rm", "-f", "-t", "0", pod.name)
            if then != "replaced":
                break
        job_set = self.job_set["spec"]
        if then == "failed" or (then == "lost" and self._all_lost(role)):
            assert job_set["failurePolicy"]["rules"] == [
                {"name": "neverRestartAll", "action": "FailJobSet"}
            ]
            self._end("failed")
        elif then == "success" and role in job_set["successPolicy"]["targetReplicatedJobs"]:
            self._end("completed")

    def _then(self, role: str, code: int, pod: _Pod) -> str:
        if code == 0:
            return "success"
        if pod.removed or self.state != "running":
            return "removed"
        for rule in self.job(role)["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {"values": []})["values"]:
                then = {"FailJob": "failed", "FailIndex": "lost", "Ignore": "replaced"}
                return then[rule["action"]]
        return "replaced"

    def _all_lost(self, role: str) -> bool:
        with self.lock:
            lost = {each.index for each in self.ended if (each.role, each.then) == (role, "lost")}
            return lost == {index for name, index in self._pods if name == role}

    def _end(self, state: str) -> None:
        """Deletes the Jobs that are left."""
        with self.lock:
            if self.state != "running":
                return
            self.state = state
            left = list(self._pods)
        for role, index in left:
            name = f"{self.pod(role, index)}-{role}"
            subprocess.run(
                ["podman", "stop", "-i", "-t", "90", name],
                env=environment_of(self.folder),
                capture_output=True,
            )

    def _play(self, role: str, index: int) -> _Pod:
        host = f"{self.name}-{role}-0-{index}"
        # As of Kubernetes: no name of a run before that podman could not remove.
        pod = _Pod(f"{host}-{token_hex(3)}")
        with self.lock:
            self._pods[role, index] = pod
        path = self.files / f"{pod.name}.yaml"
        # A ConfigMap is played with each pod that mounts it.
        others = [each for each in self.documents if each["kind"] == "ConfigMap"]
        made = [*others, self._manifest(role, index, host, pod.name)]
        path.write_text(yaml.safe_dump_all(json.loads(json.dumps(made))))
        network = f"{self.network}:alias={host}.{self.name}"
        with self._volumes:
            podman(self.folder, "kube", "play", "--quiet", "--network", network, str(path))
        with self.lock:
            pod.runs = True
        return pod

    def _manifest(self, role: str, index: int, host: str, name: str) -> Any:
        template = json.loads(json.dumps(self.template(role)))
        spec = template["spec"]
        spec["hostname"] = host
        [container] = spec["containers"]
        container["env"] = [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
        container["args"] = [
            _expanded(each, {"JOB_COMPLETION_INDEX": str(index)}) for each in container["args"]
        ]
        # podman would open these ports on this machine, too.
        for unused in ("startupProbe", "livenessProbe", "ports"):
            del container[unused]
        for volume in spec["volumes"]:
            if "secret" in volume:
                secret = volume.pop("secret")
                assert secret["defaultMode"] == SECRET_MODE
                assert spec["securityContext"]["fsGroup"] == SECRET_GROUP
                path = str(self.files / secret["secretName"])
                volume["hostPath"] = {"path": path, "type": "Directory"}
        metadata = {"name": name, **template["metadata"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _write_secret(self, name: str, data: Mapping[str, str]) -> None:
        """Writes what kubelet mounts: files of root, readable for the group, behind links."""
        path = self.files / name
        (path / "..first").mkdir(parents=True)
        for key, value in data.items():
            file = path / "..first" / key
            file.write_bytes(base64.b64decode(value))
            file.chmod(SECRET_MODE)
            os.chown(file, 0, SECRET_GROUP)
            (path / key).symlink_to(Path("..data", key))
        (path / "..data").symlink_to("..first")


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """Expands ``$(NAME)``, and ``$$`` to a dollar, as kubelet does."""
    parts = text.split("$$")
    for name, value in values.items():
        parts = [part.replace(f"$({name})", value) for part in parts]
    return "$".join(parts)
