"""OpenTelemetry spans of the parts of a step: pull, push, push_pull, apply, checkpoint.

Without :func:`tracing`, which needs the extra ``tf-pserver[otel]``, a process does not import
OpenTelemetry, and a span costs a function call. Workers and shards do not share traces, since one
standing exchange carries many steps. Their spans can be matched by the batch, which is an attribute
of both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from psrpc import SOFTWARE
from psrpc.core.errors import InvalidArgument
from psrpc.ops.extras import missing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

FLUSH_MS = 2_000
"""Time limit for sending the remaining spans at the end."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_tracer: Tracer | None = None


def span(name: str, **attributes: object) -> AbstractContextManager[Any]:
    """Measures the block within the context; records an exception that leaves it.

    Args:
        name: the name of the operation, e.g. ``"push"``.
        attributes: e.g. ``batch``; ignored without :func:`tracing`.
    """
    if _tracer is None:
        return _NOTHING
    described = {
        f"pserver.{key}": value if isinstance(value, bool | int | float) else str(value)
        for key, value in attributes.items()
    }
    return _tracer.start_as_current_span(name, attributes=described)


@contextmanager
def tracing(endpoint: str, process: str, exporter: SpanExporter | None = None) -> Iterator[None]:
    """Makes spans of the whole process within the context and sends them in the background.

    Args:
        endpoint: OTLP over HTTP, ``http://HOST:4318/v1/traces``; empty for no spans.
        process: the kind of process, e.g. ``"shard"``.
        exporter: receives the spans instead of ``endpoint``.

    Raises:
        InvalidArgument: not an HTTP URL.
        InvalidJob: OpenTelemetry is not installed.
    """
    global _tracer
    if not endpoint and exporter is None:
        yield
        return
    exporter = exporter or _to(endpoint)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"pserver-{process}", "service.version": SOFTWARE})
    # Not the global provider, which belongs to other users of OpenTelemetry in this process.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("pserver")
    try:
        yield
    finally:
        _tracer = None
        # Flushes in a thread, since the exporter retries for longer than its time limit.
        flushing = threading.Thread(target=provider.force_flush, args=(FLUSH_MS,), daemon=True)
        flushing.start()
        flushing.join(FLUSH_MS / 1000)


def _to(endpoint: str) -> SpanExporter:
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(
            f"--trace is {endpoint!r}; expected http://HOST:4318/v1/traces, an OTLP endpoint"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needs = f"OpenTelemetry ({error.name})"
        raise missing("--trace", needs, "otel", "leave --trace out") from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return exporter
