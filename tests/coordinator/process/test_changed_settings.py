"""``coordinator serve`` while the settings of its job are changed: described anew, ended, and
served again with them."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.__main__ import make_parser
from coordinator.client.client import CoordinatorClient
from coordinator.core.lifecycle import STOPPED
from coordinator.launch.commands import UpOptions, cluster, resume_command
from coordinator.launch.up import _options
from coordinator.process import describing
from coordinator.process.options import ServeOptions, options_from
from coordinator.process.serve import serve
from coordinator.rpc.server import Server
from psrpc.core.errors import InvalidJob
from psrpc.files.run_paths import read_summary
from psrpc.security.credentials import PLAINTEXT
from tests.coordinator.builders import description_json
from tests.coordinator.fakes import start_training
from tests.coordinator.fixtures import options, run_with

SYNC: dict[str, Any] = {"mode": "sync", "replicas": 2}
CHANGED = ("dense=allreduce", "slices=1")
REASON = "stopped for dense=allreduce slices=1"


def describing_as_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The child process describes a job with the settings that it is given, or refuses them.
    Returns what a coordinator answers that is about to start it."""
    bind, servers = Server.bind, list[Server]()
    said_meanwhile: list[str] = []

    def bound(server: Server) -> int:
        servers.append(server)
        return bind(server)

    def command(_job: Path, _mode: object, _replicas: object, settings: Sequence[str]) -> list[str]:
        said_meanwhile.append(str(servers[-1]._why_closed("GetJobStatus")))
        said = dict(setting.split("=") for setting in settings)
        if said.get("slices") == "9":
            words = "Traceback:\n\nerror PS108: the model asks for too much"
            return [sys.executable, "-c", f"import sys; sys.exit({words!r})"]
        slices = said.get("slices")
        hosted = {"dense": said.get("dense", "shards"), "slices": slices and int(slices)}
        document = description_json(**SYNC, **hosted)
        return [sys.executable, "-c", f"print({json.dumps(document)!r})"]

    monkeypatch.setattr(Server, "bind", bound)
    monkeypatch.setattr(describing, "describe_command", command)
    return said_meanwhile


def as_said(run_dir: Path) -> ServeOptions:
    """The options of the coordinator that the command of a stopped `coordinator up` starts."""
    printed = resume_command(UpOptions("tiny.py", run_dir=run_dir))
    args = make_parser(["up"]).parse_args([*shlex.split(printed)[1:], "--no-dashboard"])
    up = _options(args, args.run_dir, PLAINTEXT)
    words = cluster(up, {}, 1, "127.0.0.1:0").coordinator.arguments
    args = make_parser(["serve"]).parse_args(words[words.index("serve") :])
    return options_from(args.configuration.options(args, {}))


def test_a_coordinator_ends_for_another_start_and_serves_the_job_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options(tmp_path / "run", starts_again=True, workers=1)

    def change(client: CoordinatorClient) -> None:
        _, [stream], [worker] = start_training(client)
        while client.get_job_status().phase != "training":
            pass  # the first checkpoint is committed
        with pytest.raises(InvalidJob, match=r"^the model asks for too much$") as refused:
            client.set_policy(["slices=9"], 60)
        assert refused.value.code == "PS108"
        with pytest.raises(InvalidJob, match=r"2 slices of the parameters .* and 1 worker to"):
            client.set_policy(["dense=allreduce", "slices=2"], 60)
        status = client.get_job_status()
        assert (status.phase, status.switching, list(status.changed)) == ("training", "", [])
        assert client.set_policy(list(CHANGED), 60).restart == list(CHANGED)
        shutdown = next(stream).shutdown
        assert (shutdown.failed, shutdown.reason) == (False, REASON)
        assert list(stream) == []
        worker.leave()

    def look(client: CoordinatorClient) -> None:
        status = client.get_job_status()
        assert (status.phase, tuple(status.changed)) == ("recovering", CHANGED)
        assert status.newest_checkpoint == "checkpoints/step-00000000"
        assert tuple(client.get_job().overrides) == CHANGED
        os.kill(os.getpid(), signal.SIGINT)

    for then, status in ((change, 76), (look, 130), (look, 130)):
        answers = describing_as_asked(monkeypatch)
        assert run_with(monkeypatch, wanted, then) == status
        monkeypatch.undo()
        anew = "describing the job anew with dense=allreduce slices=1"
        reads = "reading its job" if then is change or wanted.resume else anew
        assert answers[0].startswith(f"the coordinator is {reads} (")
        summary = read_summary(tmp_path / "run")
        assert summary["reason"] == (REASON if then is change else STOPPED)
        if then is look:
            # The command that `coordinator up` says goes on with what was set.
            wanted = as_said(tmp_path / "run")
    describing_as_asked(monkeypatch)
    with pytest.raises(InvalidJob) as raised:
        asyncio.run(serve(options(tmp_path / "run", resumption="always", shards=2)))
    assert raised.value.code == "PS107"
    assert str(raised.value).endswith(
        "leave one of them out. dense=allreduce slices=1 was set while the job ran (`coordinator "
        "set`) and holds until a start says otherwise: --set dense=... --set slices=..."
    )
