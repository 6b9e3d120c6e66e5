"""``/metrics`` of a process, for Prometheus.

Collects on request the figures that a process keeps anyway, so it does not slow down training. The
endpoint is read-only and serves figures and names, never values of parameters. It serves plain HTTP
on loopback. Elsewhere it serves HTTPS to clients with a certificate of a role that may read it
(:func:`psrpc.security.identity.may_read_metrics`), or plain HTTP with ``--insecure``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from psrpc.core.errors import PortInUse
from psrpc.metrics.http_head import HEALTH, Head, known_host
from psrpc.metrics.http_server import BOUNDS, Answer, Bounds, HttpServer
from psrpc.net.channel import check_metrics_address, format_address, is_loopback, parse_address
from psrpc.ops.logs import get_logger
from psrpc.options.settings import OFF
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.https import ServerContext
from psrpc.security.identity import may_read_metrics
from psrpc.security.peer_certificate import peer_of_der

log = get_logger()

Family = Any
"""A ``prometheus_client.Metric`` of any kind: name, documentation and samples."""

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Upper bounds of the buckets of a histogram of staleness, in versions. Shards count up to 63."""


class MetricsServer:
    """Serves metrics at its own address, also as a context manager. Thread-safe.

    Calls ``collect`` on a thread of its own: once for all requests since the last call.
    """

    def __init__(
        self,
        address: str,
        collect: Callable[[], Iterable[Family]],
        security: Security = PLAINTEXT,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """``address`` is HOST:PORT, with port 0 for any, or ``"off"`` to serve nothing."""
        self._requested = address
        self._collect = collect
        self._security = security
        self._bounds = bounds
        self._pages: _Pages | None = None
        self._server: HttpServer | None = None
        self.address = OFF
        """The address once started."""

    def start(self) -> str:
        """Starts to serve; returns the address.

        Raises:
            PortInUse: the address is not available.
            InvalidArgument: it is malformed, or other machines can reach it in plaintext without
                ``--insecure``, or with a token, which only gRPC supports.
        """
        if self._requested == OFF:
            return OFF
        host, port = parse_address(self._requested)
        check_metrics_address(self._requested, self._security)
        encrypted = self._security.encrypted and not is_loopback(host)
        pages = _Pages(self._collect, self._security, host, encrypted=encrypted)
        context = ServerContext(self._security).current if encrypted else None
        server = HttpServer(pages.respond, context, self._bounds, "metrics")
        try:
            port = server.start(host, port)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {self._requested}: {error.strerror or error}; stop the "
                "process there, or choose another --metrics HOST:PORT, or --metrics off"
            ) from None
        self._pages, self._server = pages, server
        self.address = format_address(host, port)
        return self.address

    def stop(self) -> None:
        """Stops serving."""
        if self._server is not None and self._pages is not None:
            self._server.stop()
            self._pages.close()
            self._server = self._pages = None

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Family]:
        try:
            return list(self._collect())
        except Exception as error:
            log.warning("metrics could not be read", why=str(error) or type(error).__name__)
            raise

    def describe(self) -> Iterable[Family]:
        # Without this method, registering would collect figures before there are any.
        return ()


class _Collected(Collector):
    """Collected figures, for an encoder."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


class _Pages:
    """Makes the answers; all but :meth:`close` run in the server's event loop."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Family]],
        security: Security,
        host: str,
        *,
        encrypted: bool,
    ) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(lambda: [*collect(), *certificate_families(security)]))
        self._security = security
        self._encrypted = encrypted
        # Checks names only in plaintext, where a page of another site can point its own name here.
        # With certificates it cannot, since the browser has none; and scrapers may use any name of
        # their network.
        self._names = None if encrypted else {host, socket.gethostname()}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._collecting = asyncio.Lock()
        self._next: asyncio.Future[list[Family]] | None = None

    def close(self) -> None:
        """Releases the thread, after the last request."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def respond(self, head: Head, certificate: bytes | None) -> Answer:
        """See :data:`psrpc.metrics.http_server.Respond`."""
        names = self._names
        if names is not None and head.host is not None and not known_host(head.host, names):
            expected = ", ".join(sorted(names))
            return _words(421, f"ask by IP address, localhost or one of {expected}")
        if self._encrypted and (refused := self._refusal(head, certificate)):
            return _words(403, refused)
        if head.path == HEALTH:
            return _words(200, str(self._security.role or "unknown"))
        if head.path not in ("/", "/metrics"):
            return _words(404, f"there is /metrics, and {HEALTH}")
        try:
            families = await self._figures()
        except Exception as error:
            # _Collector has logged it.
            return _words(500, f"no figures: {type(error).__name__}")
        encode, kind = choose_encoder(head.accept)
        return Answer(200, encode(_Collected(families)), kind)

    def _refusal(self, head: Head, certificate: bytes | None) -> str:
        """Returns why the holder of a TLS-verified certificate has no access; empty if it has."""
        me = self._security.identity
        assert me is not None
        assert certificate is not None
        peer = peer_of_der(certificate)
        objection = self._security.objection(peer)
        if objection is not None:
            return objection.coded
        identity = peer.identity
        # All roles of the job may read the health, as with gRPC.
        alive = head.path == HEALTH and identity is not None and identity.job == me.job
        if alive or may_read_metrics(identity, me):
            return ""
        holder = identity or "a certificate that names no role"
        return f"{holder} may not read the metrics of {me}"

    async def _figures(self) -> list[Family]:
        if self._next is None:
            self._next = asyncio.ensure_future(self._collected())
            # Retrieves the error even if all clients have left.
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._next)

    async def _collected(self) -> list[Family]:
        async with self._collecting:
            # Requests that arrive from now on need newer figures.
            self._next = None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: list(self._registry.collect()))


def _words(status: int, text: str) -> Answer:
    return Answer(status, f"{text}\n".encode())


def certificate_families(security: Security) -> Iterator[Family]:
    """Yields ``psrpc_*``, the metrics of the certificates of any process; none in plaintext."""
    if security.encrypted:
        expires = security.files.certificates().expires
        yield GaugeMetricFamily(
            "psrpc_certificate_expiry_timestamp_seconds",
            "Seconds since 1970 until which certificate and authority are valid.",
            value=expires.timestamp(),
        )


def histogram(
    name: str,
    documentation: str,
    counts: Iterable[tuple[Sequence[str], Sequence[int]]],
    labels: Sequence[str],
) -> HistogramMetricFamily:
    """Makes a histogram from counts by staleness, see ``pserver.core.counters``.

    Args:
        counts: label values, and the numbers of gradients with staleness 0, 1, 2, …; the last of 64
            entries counts all from there on, so the sum is a lower bound.
    """
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, numbers in counts:
        below = [(f"{bound:.1f}", float(sum(numbers[: bound + 1]))) for bound in STALENESS_BOUNDS]
        total = float(sum(staleness * count for staleness, count in enumerate(numbers)))
        family.add_metric(values, [*below, ("+Inf", float(sum(numbers)))], total)
    return family
