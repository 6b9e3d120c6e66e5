"""Mistakes with addresses, ports, names, firewalls and certificates.

Each ends in the right code, with what to do in words, and nothing of it waits for a deadline that
a user would have to wait for: what is in the way is looked up by hand, each step within a second.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

import coordinator.client.client
import pserver.process.coordination
import worker.process.run
from coordinator.certificates.authority import make_certificates, renew_certificates
from psrpc.net.channel import make_server
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from tests.coordinator.builders import make_run, serving
from tests.e2e.cluster import JOBS
from tests.mistakes.commands import Said, say

JOB = JOBS / "dense.py"
"""That it is there is looked at first."""


@dataclass
class Place:
    """Coordinators that are there, and things that only look like one."""

    path: Path
    certs: Path
    plaintext: str
    encrypted: str
    expired: str
    shard: str
    full: str
    silent: str
    web: str
    unused: str = field(default="")

    def mixed(self, name: str, **files: str) -> Path:
        """A directory with files of several: ``name.crt`` of the directory that is its value."""
        made = self.path / name
        made.mkdir()
        for file, source in files.items():
            target = made / file.replace("_", ".")
            target.write_bytes((self.certs / source).read_bytes())
            target.chmod(0o600)
        return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("place")
    certs = path / "certs"
    now = datetime.now(UTC)
    make_certificates(certs / "job", "job", now)
    make_certificates(certs / "again", "job", now)
    make_certificates(certs / "old", "job", now - timedelta(days=400))
    shutil.copytree(certs / "old", certs / "renewed")
    renew_certificates(certs / "renewed", now)
    own = Security.from_options(Role.COORDINATOR, certs / "job")
    for name in ("plain", "tls"):
        (path / name).mkdir()
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serving(make_run(path / "plain")))
        tls = stack.enter_context(serving(make_run(path / "tls"), security=own))

        def start(bind: Callable[[grpc.Server], int]) -> str:
            server = make_server(1)
            port = bind(server)
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return f"127.0.0.1:{port}"

        def listen(backlog: int) -> socket.socket:
            return stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))

        pair = [(certs / "old" / f"coordinator.{kind}").read_bytes() for kind in ("key", "crt")]
        credentials = grpc.ssl_server_credentials([(pair[0], pair[1])])
        full, silent, web = listen(0), listen(5), listen(5)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        answering = threading.Thread(target=_answer, args=(web,))
        answering.start()
        stack.callback(answering.join)
        stack.callback(web.shutdown, socket.SHUT_RDWR)
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))
        yield Place(
            path,
            certs,
            plain.address,
            tls.address,
            start(lambda server: server.add_secure_port("127.0.0.1:0", credentials)),
            start(lambda server: server.add_insecure_port("127.0.0.1:0")),
            *(f"127.0.0.1:{one.getsockname()[1]}" for one in (full, silent, web, unused)),
        )


def _answer(web: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = web.accept()
            with client:
                client.recv(1024)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def status(where: str, certs: str = "") -> Callable[[Place], list[object]]:
    """``coordinator status`` at one of the addresses, with one of the certificates."""
    return lambda place: [
        *("coordinator", "status", "--coordinator", getattr(place, where, where)),
        *(("--certs", place.certs / certs) if certs else ()),
    ]


MISTAKES: dict[str, tuple[Callable[[Place], list[object]], str, str]] = {
    "a wrong port": (status("unused"), "PS204", "nothing listens at .*; check the port"),
    "an unknown host name": (
        status("coordinatr.invalid:5000", "job"),
        "PS207",
        "check its spelling",
    ),
    "no port number": (status("host:http"), "PS111", "expected 0 to 65535"),
    "a firewall drops the packets": (status("full"), "PS209", "firewall .* let TCP through"),
    "a silent server": (status("silent"), "PS213", "look at its log"),
    "a web server's port": (status("web"), "PS212", "check the port"),
    "a shard's address": (status("shard"), "PS212", "give the coordinator's address"),
    "no certificates, and the other wants some": (status("encrypted"), "PS331", "say --certs DIR"),
    "certificates, and the other has none": (
        status("plaintext", "job"),
        "PS332",
        "start the other with --certs",
    ),
    "certificates of another making": (
        status("encrypted", "again"),
        "PS333",
        "files that one `coordinator certs init` made",
    ),
    "a certificate that has expired": (
        status("encrypted", "old"),
        "PS313",
        "coordinator certs renew",
    ),
    "the server's certificate has expired": (
        status("expired", "renewed"),
        "PS335",
        "`coordinator certs renew` it there",
    ),
    "a certificate of another role": (
        lambda place: [
            *("coordinator", "status", "--coordinator", place.encrypted, "--certs"),
            place.mixed(
                "renamed",
                ca_crt="job/ca.crt",
                operator_crt="job/worker.crt",
                operator_key="job/worker.key",
            ),
        ],
        "PS314",
        "certificate of a worker .*; expected one of an operator",
    ),
    "files of another role alone": (
        lambda place: [
            *("coordinator", "status", "--coordinator", place.encrypted, "--certs"),
            place.mixed("workers", ca_crt="job/ca.crt", worker_crt="job/worker.crt"),
        ],
        "PS311",
        "operator.crt: this takes the files of role operator, and .* has those of worker; copy it "
        "from where the job's certificates were made; a new",
    ),
    "a reader's certificate for what an operator does": (
        lambda place: [
            *("coordinator", "set", "mode=async", "--coordinator", place.encrypted, "--certs"),
            place.mixed("readers", ca_crt="job/ca.crt", reader_crt="job/reader.crt"),
        ],
        "PS311",
        "this takes the files of role operator, and .* has those of reader;",
    ),
    "a key that others may read": (
        lambda place: [
            *("coordinator", "status", "--coordinator", place.encrypted, "--certs"),
            _readable(
                place.mixed(
                    "readable",
                    ca_crt="job/ca.crt",
                    operator_crt="job/operator.crt",
                    operator_key="job/operator.key",
                )
            ),
        ],
        "PS312",
        "chmod 600",
    ),
    "to the network without certificates": (
        lambda _: ["coordinator", "serve", "--job", JOB, "--bind", "0.0.0.0:0"],
        "PS321",
        "coordinator certs init DIR",
    ),
    "a port in use": (
        lambda place: ["coordinator", "serve", "--job", JOB, "--bind", place.plaintext],
        "PS208",
        "is in use by another process; stop it or choose another --bind",
    ),
    "an address of another machine": (
        lambda place: [
            *("coordinator", "serve", "--job", JOB, "--bind", "192.0.2.1:0", "--certs"),
            place.certs / "job",
        ],
        "PS208",
        "check --bind",
    ),
    "a setting of a policy that there is not": (
        lambda place: ["coordinator", "set", "stalenes=4", "--coordinator", place.plaintext],
        "PS104",
        "did you mean 'staleness'",
    ),
    "a policy without workers": (
        lambda place: ["coordinator", "set", "max_staleness=4", "--coordinator", place.plaintext],
        "PS210",
        "",
    ),
}


NEVER_ANSWER = {"a firewall drops the packets", "a silent server"}


def _readable(directory: Path) -> Path:
    (directory / "operator.key").chmod(0o644)
    return directory


@pytest.fixture(autouse=True)
def _short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never answer are waited for a second; here, less, but for a report. Who does
    answer, a name server too, has the time that a busy machine takes."""
    if not request.config.getoption("--report"):
        silent = any(one in request.node.name for one in NEVER_ANSWER)
        monkeypatch.setattr(coordinator.client.client, "LOOK_S", 0.1 if silent else 60.0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_cause_and_what_to_do(
    place: Place, mistake: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command, code, fix = MISTAKES[mistake]
    said = say(capfd, *command(place))
    _check(said, code, fix)
    assert said.status == 2


def _check(said: Said, code: str, fix: str) -> None:
    assert said.code == code, said.everything
    assert re.search(fix, said.message), said.message
    assert "Traceback" not in said.everything


def serve(where: str, *arguments: str) -> tuple[str, ...]:
    return ("pserver", "serve", "--coordinator", where, "--connect-timeout", "0.3", *arguments)


@pytest.mark.usefixtures("own_signals")
def test_a_shard_that_finds_no_coordinator(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, *serve(place.unused, "--shard", "0"))
    fix = rf"^no coordinator answers \(tried for \d+ s\): nothing listens at {place.unused}; check "
    _check(said, "PS204", f"{fix}.*, or say another --coordinator$")
    certs = ("--certs", str(place.certs / "job"))
    said = say(capfd, *serve("no.invalid", "--shard", "0", "--bind", "127.0.0.1:0", *certs))
    _check(said, "PS207", "check its spelling")
    said = say(capfd, *serve(place.encrypted, "--shard", "0"))
    _check(said, "PS331", "say --certs")
    assert said.status == 2


@pytest.mark.usefixtures("own_signals")
def test_a_shard_that_has_no_place(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = say(capfd, *serve(place.plaintext, "--shard", "5"))
    _check(said, "PS134", "this job has 1 shard, so --shard is 0")
    monkeypatch.setattr(pserver.process.coordination, "SOFTWARE", "9.9")
    said = say(capfd, *serve(place.plaintext, "--shard", "0"))
    _check(said, "PS131", "install the same on both")


class _Loads(Exception):
    """TensorFlow would be imported now."""


@pytest.mark.usefixtures("own_signals")
def test_a_worker_that_no_waiting_helps(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told so before the seconds that TensorFlow takes; others may wait in these."""

    def load() -> None:
        raise _Loads

    monkeypatch.setattr(worker.process.run, "import_tensorflow", load)

    def run(where: str, *arguments: object) -> Said:
        return say(capfd, "worker", "run", "--coordinator", where, *arguments)

    _check(run(place.web), "PS212", "check the port")
    _check(run(place.shard), "PS212", "give the coordinator's address")
    _check(run(place.encrypted), "PS331", "say --certs DIR")
    _check(run(place.encrypted, "--certs", place.certs / "again"), "PS333", "files that one")
    _check(run(place.plaintext), "PS102", "say where it is here with --job FILE")
    said = run(place.plaintext, "--job", JOB)
    _check(said, "PS132", "copy the same file to every machine")
    assert "no answer yet" not in said.everything
    with pytest.raises(_Loads):
        run(place.unused)
    assert f"no answer yet from the coordinator at {place.unused}: PS204" in capfd.readouterr().err


def test_workers_without_shards(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    said = say(capfd, "coordinator", "status", "--coordinator", place.plaintext)
    assert said.status == 0
    assert "waiting for shard 0" in said.everything
