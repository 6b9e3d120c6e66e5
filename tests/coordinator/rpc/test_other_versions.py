"""Answers to processes of another version of this software: the table of docs/upgrading.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc import SOFTWARE
from psrpc.core.errors import JobMismatch
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import make_run, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble

OTHER = "0.0.9"
ROOT = Path(__file__).resolve().parents[3]


def test_members_of_another_version_are_refused_by_name_and_readers_are_served(
    tmp_path: Path,
) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        with pytest.raises(JobMismatch) as shard:
            client.register_shard(pb.RegisterShardRequest(incarnation=1, software=OTHER))
        with pytest.raises(JobMismatch) as worker:
            WorkerDouble(client, 7).register(software=OTHER)
        for who, error in (("shard 0", shard.value), ("worker with pid 7", worker.value)):
            assert error.code == "PS131"
            versions = rf"runs version {OTHER} of this software, the coordinator {SOFTWARE};"
            assert re.search(rf"{who}.* {versions} install the same on both$", str(error))
        # None was let in, and those that only look see which version it is.
        status = client.get_job_status()
        assert (status.software, [each.state for each in status.shards]) == (SOFTWARE, ["missing"])
        assert client.get_job().software == SOFTWARE
        ShardDouble(client, 0).register()


def test_the_page_names_every_pair() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    for process in ("shard", "worker", "a command, such as", "`--description` file"):
        assert any(row.startswith(process) for row in rows), process
