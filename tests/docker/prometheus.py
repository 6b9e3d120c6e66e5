"""Queries of the Prometheus that ``docker/prometheus.yml`` configures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.docker.engine import ROOT

TEXT = (ROOT / "docker/prometheus.yml").read_text()

CERTIFICATES = "ca_file: /certs/ca.crt, cert_file: /certs/reader.crt, key_file: /certs/reader.key"


@dataclass(frozen=True)
class Target:
    """One service, of which there may be several containers."""

    role: str
    host: str
    port: int
    server_name: str


def scrape_targets() -> list[Target]:
    """All, in the order of the file."""
    jobs = re.findall(
        r"^  - job_name: (\S+)\n"
        r"    scheme: https\n"
        rf"    tls_config: {{{CERTIFICATES}, server_name: (\S+)}}\n"
        r"    dns_sd_configs: \[{names: \[(.+)\], type: A, port: (\d+)}\]$",
        TEXT,
        re.MULTILINE,
    )
    assert len(jobs) == TEXT.count("job_name")
    return [
        Target(role, host, int(port), server_name)
        for role, server_name, hosts, port in jobs
        for host in hosts.split(", ")
    ]
