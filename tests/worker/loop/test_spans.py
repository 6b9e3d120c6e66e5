"""Spans of a worker's steps and of the shards that take part in them."""

from __future__ import annotations

from collections import Counter

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from psrpc.core.batch import BatchId
from psrpc.ops.tracing import tracing
from psrpc.v1 import types_pb2
from tests.pserver.shards import INITIAL, signed
from tests.worker.loop.test_router import arrays, make_cut_plan, parts
from tests.worker.shards import pushes, serve_shards, standing_alone
from worker.loop.router import Router

BATCH = BatchId(0, 0, 10)


def test_an_async_step() -> None:
    plan = make_cut_plan(2)
    exporter = InMemorySpanExporter()
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as router,
        tracing("", "test", exporter),
    ):
        into = arrays(plan, 0)
        router.initialize(arrays(plan, 1), INITIAL)
        router.pull(None, into)
        router.push_pull(pushes(router, BATCH, 1, parts(plan, arrays(plan, 5))), into)
    spans = exporter.get_finished_spans()
    assert Counter(span.name for span in spans) == {"pull": 1, "push_pull": 1, "apply": 2}
    # By the batch, spans of the worker are found beside those of the shards.
    (pushed,) = (span for span in spans if span.name == "push_pull")
    applied = [dict(span.attributes or {}) for span in spans if span.name == "apply"]
    assert {found["pserver.shard"] for found in applied} == {0, 1}
    assert {found["pserver.batch"] for found in applied} == {str(BATCH)}
    assert dict(pushed.attributes or {})["pserver.batch"] == str(BATCH)
    for span in spans:
        if span.name == "apply":
            assert pushed.start_time is not None
            assert pushed.end_time is not None
            assert span.start_time is not None
            assert pushed.start_time <= span.start_time <= pushed.end_time


def test_a_sync_step() -> None:
    plan = make_cut_plan(1)
    exporter = InMemorySpanExporter()
    with (
        serve_shards(plan, "sync", 1) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as router,
        tracing("", "test", exporter),
    ):
        into = arrays(plan, 0)
        router.initialize(arrays(plan, 1), INITIAL)
        router.pull(0, into)
        router.push(pushes(router, BATCH, 1, parts(plan, arrays(plan, 5))))
        batch = types_pb2.BatchId(epoch=0, first=0, count=10)
        attempt = types_pb2.Attempt(batch=batch, attempt=1)
        decision = types_pb2.Decision(generation=1, round=0, attempts=[attempt])
        router.pull(1, into, signed(decision))
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["pull", "push", "apply", "pull"]
