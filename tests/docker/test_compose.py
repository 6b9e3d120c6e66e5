"""Builds the image and trains MNIST on it: 2 shards, 1 coordinator, 2 workers, all containers.
Then once more, with a shard and a worker killed on the way: the result has the same bits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from tests.docker.engine import LIMIT_S, ROOT, base_image, compose_command, run
from tests.docker.killer import killer
from tests.docker.prometheus import scrape_targets

# Building the image downloads and unpacks TensorFlow.
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

PROJECT = f"psrpc-test-{os.getpid()}"
IMAGES = os.environ.get("IMAGE", "tf-pserver:test")
IMAGE = f"{IMAGES}-slim"
OF_PROJECT = f"label=com.docker.compose.project={PROJECT}"
SERVERS = {"coordinator": "coordinator", "shard-0": "shard", "shard-1": "shard"}
"""Each service that listens, and its role."""

CONTAINERS = 7
"""The servers, two workers, and those that made the certificates and the job's description."""

ON_DEMAND = {
    "certs": "",
    "description": "",
    "worker": "worker",
    "operator": "operator",
    "dashboard": "operator",
}
"""All other services, and whose keys they have. The first one has those of all, elsewhere."""

RESTARTS = 5
"""How often compose.yml has a container started again that fails."""

END_S = 300
"""How long the job may take until its containers have left."""

EPOCHS = 5
EXAMPLES = EPOCHS * 60000

# Rounds of two batches of 100. One thread for each operation: then sums have one order.
OPTIONS = (
    f"--mode sync --set replicas=2 --set epochs={EPOCHS} --set checkpoint_every=100 "
    # Its shards have no TensorFlow.
    "--set engine=numpy "
    "--set optimizer.learning_rate=0.1 --set intra_op_threads=1"
)


class Compose:
    """``docker/compose.yml`` under a project name of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._command = [*compose_command(), "-p", PROJECT, "-f", str(ROOT / "docker/compose.yml")]
        self._environment = environment

    def __call__(self, *arguments: str) -> str:
        return run([*self._command, *arguments], LIMIT_S, **self._environment)

    def operator(self, *command: str) -> str:
        """Output of a command with the operator's certificate."""
        return self("run", "--rm", "-T", "operator", *command)

    def containers(self) -> list[str]:
        return run(["docker", "ps", "-aq", "--filter", OF_PROJECT]).split()

    def container(self, service: str) -> str:
        return self("ps", "-q", service).split()[0]

    def wait_for_the_end(self, count: int = CONTAINERS) -> None:
        statuses = self.statuses()
        assert statuses == ["0"] * count, self("logs", "--no-color")

    def statuses(self) -> list[str]:
        """The exit status of every container, once all have left for good."""
        try:
            return run(["docker", "wait", *self.containers()], limit_s=END_S).split()
        except subprocess.TimeoutExpired:
            pytest.fail(f"not at its end within {END_S} s\n" + self("logs", "--no-color"))

    def with_job(self, job: str) -> Compose:
        """The same project with another JOB."""
        return Compose({**self._environment, "JOB": job})

    def wait_for_line(self, service: str, word: str, since: float = 0.0) -> str:
        """The first line of a service's log since then (Unix time) that has ``word``."""
        with subprocess.Popen(
            ["docker", "logs", "--follow", "--since", f"{since:.0f}", self.container(service)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as said:
            assert said.stdout is not None
            lines = []
            for line in said.stdout:
                lines.append(line)
                if word in line:
                    said.terminate()
                    return line
        pytest.fail("".join(lines))

    def down(self) -> None:
        self("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with base_image() as build_arguments:
        job = {"JOB": "examples/mnist_softmax.py", "JOB_OPTIONS": OPTIONS}
        # Nothing may be at the page's usual port.
        port = {"DASHBOARD_PORT": str(free_port())}
        shards = {"SHARD_TARGET": "slim"}
        found = Compose({**build_arguments, "IMAGE": IMAGES, **job, **port, **shards})
        try:
            found("build", "coordinator", "worker")
            yield found
        finally:
            found.down()


@pytest.fixture(scope="module")
def began(compose: Compose) -> float:
    """When all that serve were started; they are healthy, and wait for workers."""
    since = time.time()
    compose("up", "-d", *SERVERS)
    wait_until_healthy({*SERVERS}, since)
    # One that is healthy may be reading its job still.
    compose.wait_for_line("coordinator", "serving", since)
    return since


@pytest.fixture(scope="module")
def page(compose: Compose, began: float) -> str:
    """Where the dashboard of the service of that name is; it answers."""
    compose("up", "-d", "dashboard")
    compose.wait_for_line("dashboard", "dashboard http")
    where = run(["docker", "port", compose.container("dashboard")]).split()
    # For browsers of this machine alone.
    assert (len(where), where[-1].rpartition(":")[0]) == (3, "127.0.0.1")
    return f"http://{where[-1]}/"


@pytest.fixture(scope="module")
def undisturbed(compose: Compose, page: str) -> dict[str, Any]:
    """The summary of a run to which nothing happened. Its containers and volumes are gone."""
    compose("up", "-d", "--scale", "worker=2", "--no-recreate")
    # The dashboard ends with the job, too.
    compose.wait_for_the_end(CONTAINERS + 1)
    # The engine remembers few events, and the newest checks of each container.
    assert all("0" in checks(worker) for worker in compose("ps", "-q", "worker").split())
    summary = read_summary()
    compose.down()
    assert compose.containers() == []
    return summary


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def wait_until_healthy(missing: set[str], since: float) -> None:
    """Reads the engine's events, also those before now, so there is nothing to poll."""
    command = ["docker", "events", "--since", f"{since:.0f}", "--filter", OF_PROJECT]
    command += ["--filter", "event=health_status", "--until", f"{time.time() + 300:.0f}"]
    with subprocess.Popen(
        [*command, "--format", "{{json .}}"], stdout=subprocess.PIPE, text=True
    ) as events:
        assert events.stdout is not None
        for line in events.stdout:
            event = json.loads(line)
            if event["Action"] == "health_status: healthy":
                missing.discard(event["Actor"]["Attributes"]["com.docker.compose.service"])
            if not missing:
                break
        events.terminate()
    assert not missing, f"not healthy within 300 s: {sorted(missing)}"


def test_the_images_run_as_an_ordinary_user(compose: Compose) -> None:
    for image in (IMAGE, f"{IMAGES}-worker"):
        assert run(["docker", "run", "--rm", image, "id", "-u"]) == "10001"
        for command in ("coordinator", "pserver", "worker"):
            assert "usage" in run(["docker", "run", "--rm", image, command, "--help"])


def test_the_slim_image_names_what_it_lacks(compose: Compose) -> None:
    describe = "! worker describe examples/mnist_softmax.py 2>&1"
    said = run(["docker", "run", "--rm", IMAGE, "sh", "-c", describe])
    assert said.startswith("error PS135: `worker describe` needs TensorFlow")
    assert "pip install 'tf-pserver[tf]'" in said


LOOK_AROUND = """
ls -m /app/certs 2>/dev/null
grep -E "^(CapEff|NoNewPrivs)" /proc/1/status
for place in /app /home/trainer /app/certs /tmp; do
    touch $place/file 2>/dev/null && echo "$place is written to"
done
true
"""


def test_a_container_holds_its_own_keys_and_no_power(compose: Compose, began: float) -> None:
    profiles = ("--profile", "operator", "--profile", "dashboard")
    services = set(compose(*profiles, "config", "--services").split())
    assert services == {*SERVERS, *ON_DEMAND}
    look = ("sh", "-c", LOOK_AROUND)
    for service, role in {**SERVERS, **ON_DEMAND}.items():
        if service in SERVERS:
            seen = run(["docker", "exec", compose.container(service), *look])
        else:
            seen = compose("run", "--rm", "-T", "--no-deps", service, *look)
        assert seen.splitlines() == [
            *([f"ca.crt, {role}.crt, {role}.key"] if role else []),
            "CapEff:\t0000000000000000",
            "NoNewPrivs:\t1",
            "/tmp is written to",
        ], service


def test_a_browser_of_this_machine_sees_the_job(compose: Compose, page: str) -> None:
    with urlopen(page + "status.json", timeout=60) as answer:
        seen = json.loads(answer.read())
    assert seen["status"]["job"] == "mnist_softmax"
    with urlopen(page + "history.json", timeout=60) as answer:
        events = json.loads(answer.read())["events"]
    # What was before it was started.
    assert events[0]["text"] == "mnist_softmax: waiting"


READ_METRICS = """
import http.client, socket, ssl, sys
context = ssl.create_default_context(cafile="/certs/ca.crt")
context.load_cert_chain("/certs/reader.crt", "/certs/reader.key")
for target in sys.argv[1:]:
    host, name = target.split("=")
    plain = socket.create_connection((host, 9100), timeout=60)
    connection = http.client.HTTPConnection(host)
    connection.sock = context.wrap_socket(plain, server_hostname=name)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    print(host, answer.status, answer.read().count(b"# TYPE ") > 5)
"""


def test_prometheus_can_read_what_its_file_names(compose: Compose, began: float) -> None:
    """With the certificate and the names of ``prometheus.yml``. A worker's health is that its own
    metrics answer."""
    found = [t for t in scrape_targets() if t.host in SERVERS]
    assert {target.host for target in found} == {*SERVERS}
    reader = ["docker", "run", "--rm", "--network", f"{PROJECT}_default"]
    reader += ["-v", f"{PROJECT}_reader-certs:/certs:ro", IMAGE, "python", "-c", READ_METRICS]
    said = run([*reader, *(f"{target.host}={target.server_name}" for target in found)])
    assert said.splitlines() == [f"{target.host} 200 True" for target in found]


def test_up_renews_certificates_that_end_soon(compose: Compose, began: float) -> None:
    authority = "/certs/authority/cluster"
    certs = ("run", "--rm", "-T", "certs", "coordinator", "certs")
    compose(*certs, "renew", "--days", "3", authority)
    assert "(in 2 days)  pserver://cluster/operator" in compose(*certs, "show", authority)
    compose("up", "-d", "certs")
    assert run(["docker", "wait", compose.container("certs")], limit_s=END_S) == "0"
    shown = compose.operator("coordinator", "certs", "show", "/app/certs")
    assert "(in 364 days)  pserver://cluster/operator" in shown
    # No container was started anew, and they take them.
    assert "waiting" in compose.operator()


ASK_IN_PLAINTEXT = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
for address in sys.argv[1:]:
    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            print("answered")
        except grpc.RpcError as error:
            print(error.code().name)
"""


def test_plaintext_is_refused(compose: Compose, began: float) -> None:
    addresses = [f"{service}:5000" for service in SERVERS]
    stranger = ["docker", "run", "--rm", "--network", f"{PROJECT}_default", IMAGE]
    refused = run([*stranger, "python", "-c", ASK_IN_PLAINTEXT, *addresses]).split()
    assert refused == ["UNAVAILABLE"] * len(SERVERS)
    doctor = "coordinator doctor coordinator:5000 --insecure"
    assert "coordinator:5000 wants TLS" in run([*stranger, "sh", "-c", f"! {doctor}"])
    # The servers do answer.
    compose.operator("coordinator", "healthcheck", addresses[0])
    for address in addresses[1:]:
        compose.operator("pserver", "healthcheck", address)
    status = "coordinator status --coordinator coordinator:5000 --json"
    assert json.loads(compose.operator(*status.split()))["global_step"] == 0


def test_a_cluster_of_containers_trains_mnist(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["phase"] == "done"
    assert [undisturbed[key] for key in ("mode", "shards", "workers")] == ["sync", 2, 2]
    assert (undisturbed["global_step"], undisturbed["batches"]) == (EXAMPLES / 200, EXAMPLES / 100)
    assert (undisturbed["examples"], undisturbed["generation"]) == (EXAMPLES, 1)
    # Softmax regression; a plain loop gives 0.91 to 0.92.
    assert undisturbed["eval"]["accuracy"] > 0.9


def test_killed_containers_come_back_and_every_batch_counts_once(
    compose: Compose, undisturbed: dict[str, Any]
) -> None:
    since = time.time()
    compose("up", "-d", *SERVERS)
    wait_until_healthy({*SERVERS}, since)
    # One that is healthy may be reading its job still.
    compose.wait_for_line("coordinator", "serving", since)
    shard = compose.container("shard-1")
    # Nothing trains before the killer watches. The job stands still until the shard is back, so
    # that the order for the worker is not late.
    with killer(IMAGE, PROJECT) as orders:
        orders.kill(shard, 300)
        compose("up", "-d", "--scale", "worker=2", "--no-recreate")
        worker = compose.container("worker")
        orders.kill(worker, 600)
        kills = orders.finish()
    assert [kill.phase for kill in kills] == ["training", "training"]
    for step, kill in zip((300, 600), kills, strict=True):
        assert step <= kill.step < kill.total == EXAMPLES / 200
        assert kill.step_after < kill.total
    compose.wait_for_the_end()
    assert [restarts(container) for container in (shard, worker)] == [1, 1]
    assert sum(map(restarts, compose.containers())) == 2
    summary = read_summary()
    for key in ("phase", "global_step", "batches", "examples", "eval"):
        assert summary[key] == undisturbed[key], key
    assert summary["generation"] > 1


def test_up_a_second_time_goes_on_and_a_third_time_says_that_all_is_done(compose: Compose) -> None:
    compose.down()
    compose("up", "-d")
    compose.wait_for_line("coordinator", "phase=training")
    compose("stop")
    drained = {compose.container(name): "75" for name in (*SERVERS, "worker")}
    drained[compose.container("certs")] = "0"
    left = run(["docker", "inspect", "-f", "{{.Id}} {{.State.ExitCode}}", *drained]).split()
    assert dict(zip(left[::2], left[1::2], strict=True)) == drained, compose("logs", "--no-color")
    compose("up", "-d")
    compose.wait_for_the_end(CONTAINERS - 1)
    summary = read_summary()
    assert (summary["phase"], summary["examples"]) == ("done", EXAMPLES)
    assert summary["generation"] > 1
    compose("up", "-d")
    compose.wait_for_the_end(CONTAINERS - 1)
    assert read_summary() == summary
    for service in (*SERVERS, "worker"):
        compose.wait_for_line(service, "nothing is left to do")


def test_a_refusal_ends_all_containers_soon(compose: Compose) -> None:
    """Compose starts each again, five times at most; each time it hears why, and ends at once."""
    compose.down()
    compose.with_job("examples/none.py")("up", "-d")
    endings = {service: ending(compose.container(service)) for service in (*SERVERS, "worker")}
    assert endings == dict.fromkeys(endings, (RESTARTS, 2)), compose("logs", "--no-color")
    # It leaves the refusal to the coordinator, and is not started again.
    assert ending(compose.container("description")) == (0, 0)
    compose.wait_for_line("coordinator", "error PS101: --description ")
    compose.wait_for_line("description", "error PS102: ")
    for service in ("shard-0", "shard-1", "worker"):
        compose.wait_for_line(service, "the coordinator refuses to start")


def checks(container: str) -> list[str]:
    """Results of the last health checks: ``"0"`` is healthy."""
    log = "{{range .State.Health.Log}}{{.ExitCode}} {{end}}"
    return run(["docker", "inspect", "-f", log, container]).split()


def ending(container: str) -> tuple[int, int]:
    """How often a container was started again and its last exit status, once it stays ended."""
    shown = "{{.State.Status}} {{.RestartCount}} {{.State.ExitCode}}"
    while True:
        # It may tell the status of any start, also of one that is followed by another.
        run(["docker", "wait", container], limit_s=END_S)
        state, count, status = run(["docker", "inspect", "-f", shown, container]).split()
        if state == "exited":
            return int(count), int(status)


def restarts(container: str) -> int:
    return int(run(["docker", "inspect", "-f", "{{.RestartCount}}", container]))


def read_summary() -> dict[str, Any]:
    """From the volume, which has outlived its containers' processes."""
    volume = ["-v", f"{PROJECT}_runs:/app/runs"]
    text = run(["docker", "run", "--rm", *volume, IMAGE, "sh", "-c", "cat runs/*/summary.json"])
    summary: dict[str, Any] = json.loads(text)
    return summary
