"""Spans of a real run, as a collector gets them: OTLP over HTTP, from every process."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.cluster import JOBS, up

pytestmark = pytest.mark.slow


Span = tuple[str, str, dict[str, Any]]
"""Which kind of process made it, its name, and its attributes without what they have in front."""


class Collector(ThreadingHTTPServer):
    """Takes spans at ``/v1/traces``, as OTLP says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keeps what one process sent."""
        for of_process in request.resource_spans:
            resource = {a.key: a.value.string_value for a in of_process.resource.attributes}
            process = resource["service.name"].removeprefix("pserver-")
            self.spans += [
                (process, span.name, dict(map(_read, span.attributes)))
                for scope in of_process.scope_spans
                for span in scope.spans
            ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.server.take(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def _read(attribute: Any) -> tuple[str, Any]:
    kind = attribute.value.WhichOneof("value")
    return attribute.key.removeprefix("pserver."), getattr(attribute.value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def test_every_process_sends_its_spans(tmp_path: Path) -> None:
    """A round and its checkpoint are the same to all: by these, spans are found beside others."""
    settings = ("--mode", "sync", "--set", "epochs=1", "--set", "checkpoint_every=10")
    with collecting() as collector:
        where = ("--shards", "2", "--trace", collector.url)
        run = up(JOBS / "dense.py", tmp_path / "run", *settings, *where)
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for process, name, about in collector.spans:
        found[process, name].append(about)
    assert set(found) == {
        ("worker", "pull"),
        ("worker", "push"),
        ("shard", "apply"),
        ("shard", "checkpoint"),
        ("coordinator", "checkpoint"),
    }
    rounds = range(run.summary["global_step"])
    pulled = {about["source"] for about in found["worker", "pull"]}
    assert pulled >= set(rounds)
    pushed = [about["batch"] for about in found["worker", "push"]]
    assert len(set(pushed)) == len(pushed) == run.summary["batches"]
    applied = sorted((about["shard"], about["round"]) for about in found["shard", "apply"])
    assert applied == [(shard, number) for shard in range(2) for number in rounds], "each once"
    checkpoints = sorted(about["checkpoint"] for about in found["coordinator", "checkpoint"])
    assert checkpoints == [f"step-{step:08d}" for step in (0, 10, 20, 21)]
    written = sorted(
        (about["shard"], about["checkpoint"]) for about in found["shard", "checkpoint"]
    )
    assert written == [(shard, name) for shard in range(2) for name in checkpoints]
