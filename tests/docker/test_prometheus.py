"""``docker/prometheus.yml`` and ``docker/compose.yml`` are of one mind. Needs no engine."""

from __future__ import annotations

import re

from psrpc.security.identity import Role, server_name
from tests.docker.engine import ROOT
from tests.docker.prometheus import scrape_targets

COMPOSE = (ROOT / "docker/compose.yml").read_text()


def test_every_process_with_metrics_is_read_and_known_by_its_role() -> None:
    told = re.findall(r"^    command: (\w+) .*--metrics 0\.0\.0\.0:(\d+)", COMPOSE, re.MULTILINE)
    targets = scrape_targets()
    commands = {"coordinator": "coordinator", "shard": "pserver", "worker": "worker"}
    assert [(commands[target.role], str(target.port)) for target in targets] == told
    for target in targets:
        assert target.server_name == server_name("cluster", Role(target.role))
        assert re.search(rf"^  {target.host}:$", COMPOSE, re.MULTILINE)
    assert "job=/certs/authority/cluster\n" in COMPOSE
