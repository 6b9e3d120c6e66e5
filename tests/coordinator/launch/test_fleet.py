"""The fleet with real processes: small shells."""

from __future__ import annotations

import os
from pathlib import Path

from coordinator.launch.commands import ClusterCommands, Command
from coordinator.launch.fleet import Death, Fleet
from coordinator.launch.process_health import COORDINATOR


def test_an_address_that_was_there_before_is_not_believed(tmp_path: Path) -> None:
    """A coordinator that was killed leaves it behind."""
    for name in ("gate", "told"):
        os.mkfifo(tmp_path / name)
    script = (
        f"cd {tmp_path}; read x < gate; echo 127.0.0.1:9 > new; mv new address; echo x > told; "
        "kill -9 $$"
    )
    coordinator = Command(["/bin/sh", "-c", script], os.environ)
    with Fleet(ClusterCommands("127.0.0.1:9", coordinator, {}), tmp_path) as fleet:
        for _ in range(2):
            fleet.start(COORDINATOR)
            assert fleet.wait(0.0) == []
            assert not fleet.serves
            (tmp_path / "gate").write_text("go\n")
            (tmp_path / "told").read_text()
            deaths: list[Death] = []
            while not deaths:
                deaths = fleet.wait(60.0)
            assert [death.how for death in deaths] == ["ended with signal SIGKILL"]
            assert not fleet.serves
