"""Spans of what a step is made of, for OpenTelemetry: pull, push, push_pull, apply, checkpoint.

Without :func:`tracing`, which needs the extra ``tf-pserver[otel]``, nothing of OpenTelemetry is
imported, and a span costs a function call. Workers and shards are not joined into one trace: a
standing exchange carries many steps, so their spans are found by the batch, which both name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from psrpc.core.errors import InvalidArgument
from psrpc.core.version import SOFTWARE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

FLUSH_MS = 2_000
"""How long the spans that are left may take at the end."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_tracer: Tracer | None = None


def span(name: str, **attributes: object) -> AbstractContextManager[Any]:
    """Around what is to be measured. An exception that passes through it is recorded.

    Args:
        name: what is done, e.g. ``"push"``.
        attributes: of what, e.g. ``batch``; looked at only while spans are made.
    """
    if _tracer is None:
        return _NOTHING
    said = {
        f"pserver.{key}": value if isinstance(value, bool | int | float) else str(value)
        for key, value in attributes.items()
    }
    return _tracer.start_as_current_span(name, attributes=said)


@contextmanager
def tracing(endpoint: str, process: str, exporter: SpanExporter | None = None) -> Iterator[None]:
    """Makes spans within the ``with``, of the whole process, and sends them in the background.

    Args:
        endpoint: where OTLP over HTTP is taken, ``http://HOST:4318/v1/traces``; empty for no spans.
        process: what this is, e.g. ``"shard"``.
        exporter: where spans go instead.

    Raises:
        InvalidArgument: no such endpoint, or OpenTelemetry is not installed.
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
    # Not the process's own provider: what else uses OpenTelemetry here keeps its own.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("pserver")
    try:
        yield
    finally:
        _tracer = None
        # In a thread: the exporter goes on trying for longer than it is told to.
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
        raise InvalidArgument(
            f"--trace needs OpenTelemetry ({error}); pip install 'tf-pserver[otel]', or leave "
            "--trace out"
        ) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return exporter
