from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.ops import tracing
from psrpc.ops.tracing import span

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    assert tracing._tracer is None


def test_a_span_says_what_was_done(exporter: InMemorySpanExporter) -> None:
    with tracing.tracing("", "shard", exporter), span("push", batch=BatchId(1, 2, 3), attempt=4):
        pass
    (found,) = exporter.get_finished_spans()
    assert found.name == "push"
    assert found.attributes is not None
    assert found.attributes["pserver.attempt"] == 4
    assert found.attributes["pserver.batch"] == str(BatchId(1, 2, 3))
    assert found.resource.attributes["service.name"] == "pserver-shard"


def test_errors_are_recorded(exporter: InMemorySpanExporter) -> None:
    with (
        pytest.raises(InvalidArgument),
        tracing.tracing("", "shard", exporter),
        span("apply"),
    ):
        raise InvalidArgument("no such arena")
    (found,) = exporter.get_finished_spans()
    assert not found.status.is_ok
    assert [event.name for event in found.events] == ["exception"]


def test_without_tracing_a_span_is_one_thing_that_does_nothing() -> None:
    with tracing.tracing("", "shard"):
        assert span("push", batch=object()) is span("pull")


def test_an_endpoint_that_is_none_is_named() -> None:
    with (
        pytest.raises(InvalidArgument, match=r"--trace is 'localhost:4318'; expected http://"),
        tracing.tracing("localhost:4318", "shard"),
    ):
        pass


def test_where_it_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(InvalidJob, match=r"pip install 'tf-pserver\[otel\]'"),
        tracing.tracing("http://localhost:4318/v1/traces", "shard"),
    ):
        pass


@pytest.mark.slow  # starts a process
def test_nothing_of_it_is_imported_unless_asked_for() -> None:
    code = (
        "import sys, pserver.process.shard, coordinator.process.serve, worker.loop.router\n"
        "from psrpc.ops.tracing import span, tracing\n"
        "with tracing('', 'shard'), span('push'): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
