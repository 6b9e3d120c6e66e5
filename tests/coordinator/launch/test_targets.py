from __future__ import annotations

import json
import socket
from pathlib import Path

from coordinator.launch.commands import ClusterCommands, Command, with_metrics

CLUSTER = ClusterCommands(
    "127.0.0.1:1",
    Command(["coordinator", "serve"], {}),
    {name: Command([name], {}) for name in ("shard-0", "worker-a")},
)


def test_every_process_has_an_address_and_prometheus_finds_them(tmp_path: Path) -> None:
    with with_metrics(CLUSTER, "tiny", tmp_path) as cluster:
        targets = json.loads((tmp_path / "metrics.json").read_text())
        found = {target["labels"]["process"]: target["targets"][0] for target in targets}
        assert {target["labels"]["job"] for target in targets} == {"tiny"}
        processes = {"coordinator": cluster.coordinator, **cluster.members}
        assert found.keys() == processes.keys()
        for name, command in processes.items():
            assert [*command.arguments][-2:] == ["--metrics", found[name]]
            # However often it is started again, it can listen there.
            for _ in range(2):
                with socket.create_server(("127.0.0.1", int(found[name].split(":")[1]))):
                    pass
        assert len(set(found.values())) == len(found)
    # The servers have stopped.
    assert not (tmp_path / "metrics.json").exists()
