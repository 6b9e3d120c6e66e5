"""The metrics of all processes, and the dashboard and alert rules that read them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

import coordinator.process.metrics
import pserver.process.shard
import worker.process.run
from coordinator.core.figures import CAUSES
from coordinator.core.lifecycle import Phase
from pserver.core.counters import Counters, ShardReport
from pserver.tables.tables import TableFigures
from psrpc.metrics.exporter import Family, certificate_families
from psrpc.security.credentials import PLAINTEXT
from psrpc.v1 import coordinator_pb2 as pb

DOCS = Path(__file__).resolve().parent.parent / "docs"
DASHBOARD = DOCS / "grafana.json"
ALERTS = DOCS / "alerts.yml"
RUNBOOK = DOCS / "runbook.md"

REPORT = ShardReport(
    generation=2,
    version=7,
    initialized=True,
    revoked=0,
    nbytes=1024,
    counters=Counters(applied=4, staleness=[3, 1], workers={"worker-0": [3, 1]}, apply_s=0.5),
    staged_now=0,
    waiting_for="a worker",
)
STATUS = pb.GetJobStatusResponse(
    job="tiny",
    run_id="run-1",
    phase="training",
    loss=0.5,
    global_step=7,
    checkpoint_age_s=3,
    checkpoint_interval_s=60,
    workers_joined=5,
    workers_departed=4,
    staleness_counts=[3, 1],
    shards=[pb.ShardStatus(shard=0, state="ready"), pb.ShardStatus(shard=1, state="ready")],
    workers=[pb.WorkerStatus(worker="worker-0", state="active", times=pb.WorkerTimes(data=2))],
    evaluations=[
        pb.EvaluationResult(evaluation="epoch-1", global_step=3, results={"accuracy": 0.5}),
    ],
)


def of_shard() -> list[Family]:
    return list(
        pserver.process.shard.families(3, REPORT, [TableFigures("users", 5, 640, 6, 1, 0, 7)])
    )


def of_worker() -> list[Family]:
    totals = pb.WorkerTimes(data=1, compute=2)
    membership: Any = SimpleNamespace(worker="worker-0", generation=2)
    times: Any = SimpleNamespace(steps=11, totals=lambda: totals)
    return list(worker.process.run.families(membership, "", times))


def of_coordinator(status: pb.GetJobStatusResponse = STATUS) -> list[Family]:
    return list(coordinator.process.metrics.families(status))


def of_certificates() -> list[Family]:
    found = SimpleNamespace(expires=datetime(2030, 1, 1, tzinfo=UTC))
    files = SimpleNamespace(certificates=lambda: found)
    security: Any = SimpleNamespace(encrypted=True, files=files)
    return list(certificate_families(security))


def of_process() -> list[Family]:
    return list(ProcessCollector(registry=CollectorRegistry()).collect())


def samples(families: list[Family]) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_shards_figures() -> None:
    found = samples(of_shard())
    assert found["pserver_pushes_applied_total", ("3",)] == 4
    assert found["pserver_apply_seconds_total", ("3",)] == 0.5
    assert found["pserver_version", ("3",)] == 7
    assert found["pserver_ready", ("3",)] == 1
    assert found["pserver_waiting", ("3",)] == 1
    assert found["pserver_staleness_versions_count", ("3",)] == 4
    assert found["pserver_staleness_versions_sum", ("3",)] == 1
    assert found["pserver_table_rows", ("3", "users")] == 5
    assert found["pserver_table_rows_evicted_total", ("3", "users")] == 1
    assert found["pserver_table_candidates_dropped_total", ("3", "users")] == 7


def test_a_shard_that_starts_is_there_and_not_ready() -> None:
    found = samples(list(pserver.process.shard.families(3, None, ())))
    assert {name: value for (name, _), value in found.items()} == {
        "pserver_info": 1,
        "pserver_ready": 0,
    }


def test_a_workers_figures() -> None:
    found = samples(of_worker())
    assert found["worker_steps_total", ()] == 11
    assert found["worker_seconds_total", ("compute",)] == 2
    assert found["worker_waiting", ()] == 0
    assert worker.process.run.CAUSES == CAUSES


def test_a_jobs_figures() -> None:
    found = samples(of_coordinator())
    assert found["coordinator_global_step", ()] == 7
    assert found["coordinator_phase", ("training",)] == 1
    assert found["coordinator_phase", ("done",)] == 0
    assert found["coordinator_shards", ("ready",)] == 2
    assert found["coordinator_evaluation", ("epoch-1", "accuracy")] == 0.5
    assert found["coordinator_worker_seconds_total", ("worker-0", "data")] == 2
    assert found["coordinator_checkpoint_age_seconds", ()] == 3
    assert found["coordinator_checkpoint_interval_seconds", ()] == 60
    assert found["coordinator_workers_joined_total", ()] == 5
    assert found["coordinator_workers_departed_total", ()] == 4


def test_certificates_say_until_when_they_are_valid() -> None:
    found = samples(of_certificates())
    assert found == {("psrpc_certificate_expiry_timestamp_seconds", ()): 1893456000}
    assert list(certificate_families(PLAINTEXT)) == []


def test_unknown_values_are_left_out() -> None:
    unknown = pb.GetJobStatusResponse(
        loss=float("nan"), checkpoint_age_s=-1, checkpoint_interval_s=-1, free_nbytes=-1
    )
    names = {name for name, _ in samples(of_coordinator(unknown))}
    absent = {"coordinator_loss", "coordinator_checkpoint_age_seconds", "coordinator_free_bytes"}
    absent.add("coordinator_checkpoint_interval_seconds")
    assert not names & absent
    assert not names & {"coordinator_shards", "coordinator_worker_slowness"}


@pytest.mark.parametrize(
    ("prefix", "families"),
    [
        ("pserver_", of_shard()),
        ("worker_", of_worker()),
        ("coordinator_", of_coordinator()),
        ("psrpc_", of_certificates()),
    ],
)
def test_names_are_as_prometheus_wants_them(prefix: str, families: list[Family]) -> None:
    """Prefix, snake case, base units in full, and one family for a name."""
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert re.fullmatch(prefix + r"[a-z]+(_[a-z]+)*", family.name), family.name
        assert not re.search(r"_(s|ms|us|nbytes|mb|total|per_s)$", family.name), family.name
        assert family.documentation.endswith("."), family.name


def expressions(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Of all panels: what is asked, and how it is called in the legend."""
    return [
        (target["expr"], target["legendFormat"])
        for panel in document["panels"]
        for target in panel.get("targets", ())
    ]


def labels_of_metrics() -> dict[str, set[str]]:
    """The labels of every metric that a process serves, and those that Prometheus and
    ``RUN_DIR/metrics.json`` add."""
    labels: dict[str, set[str]] = {}
    processes = (of_shard(), of_worker(), of_coordinator(), of_certificates(), of_process())
    for family in (family for families in processes for family in families):
        for sample in family.samples:
            added = {"instance", "job", "process"}
            labels.setdefault(sample.name, added).update(sample.labels)
    return labels


def check_query(expression: str, known: dict[str, set[str]], words: str = "") -> None:
    """Every metric exists, and every label that the query or ``words`` name is one of theirs."""
    names = re.findall(r"\b(?:coordinator|pserver|worker|process|psrpc)_\w+", expression)
    assert names, expression
    assert set(names) <= known.keys(), expression
    used = set(re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", words))
    used |= set(re.findall(r"\b(?:by|on) \((\w+)\)", expression))
    used |= set(re.findall(r"(\w+)=~?\"", expression))
    assert used <= set.union(*(known[name] for name in names)), expression


def test_the_dashboard_asks_for_what_there_is() -> None:
    document = json.loads(DASHBOARD.read_text())
    asked, known = expressions(document), labels_of_metrics()
    assert len(asked) > 20
    for expression, legend in asked:
        check_query(expression, known, legend)
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)


def alerts() -> dict[str, str]:
    """The text of each rule, by the name of its alert."""
    parts = re.split(r"^ +- alert: (\w+)$", ALERTS.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_alerts_ask_for_what_there_is() -> None:
    known = labels_of_metrics()
    for text in alerts().values():
        asked = re.search(r"^ +expr: (.*?)^ +(?:for|labels):", text, re.MULTILINE | re.DOTALL)
        assert asked is not None, text
        check_query(asked[1], known, text[asked.end() :])


def test_the_runbook_has_a_section_for_each_alert() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    assert sections == list(alerts())
    for name, text in alerts().items():
        assert f"runbook: docs/runbook.md#{name.lower()}\n" in text
        assert f"alertname: {name}" in (DOCS.parent / "tests/alerts/alerts.test.yml").read_text()


def test_alerts_know_every_phase_in_which_a_job_should_train() -> None:
    """In the others no batch is trained: what is left is evaluated or saved, or the job is over."""
    found = re.search(r'phase=~"([a-z|]+)"', alerts()["JobMakesNoProgress"])
    assert found is not None
    rest = {"finishing", "stopping", "restarting", "done", "failed"}
    assert set(found[1].split("|")) == set(get_args(Phase)) - rest
