"""The slices of the parameters that this worker hosts (``dense="allreduce"``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pserver.client.client import ShardClient
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.ops.logs import get_logger
from psrpc.options.settings import WorkerOptions
from psrpc.security.identity import Role
from worker.loop.session import WorkerSession

if TYPE_CHECKING:
    from pserver.process.config import ServeConfig
    from pserver.process.hosted import HostedSlice

log = get_logger()

END_S = 10.0
"""Seconds for which a worker that leaves waits for the slices that it has told to stop: longer than
a shard stays to have its state saved."""


def start_slice(config: ServeConfig, worker: int, ended: Callable[..., object]) -> HostedSlice:
    """Starts to serve a slice; see :class:`pserver.process.hosted.HostedSlice`."""
    # Most workers host nothing, and need not import what a shard is made of.
    from pserver.process.hosted import HostedSlice

    return HostedSlice(config, worker, ended)


class SliceHosting:
    """Starts the slices that the coordinator gives this worker, and ends them before the worker
    ends. Thread-safe."""

    def __init__(
        self,
        standing: WorkerSession,
        options: WorkerOptions,
        incarnation: int,
        start: Callable[..., HostedSlice] = start_slice,
        connect: Callable[..., ShardClient] = ShardClient,
    ) -> None:
        """``incarnation`` is that of this worker's process; ``start`` starts a slice, and
        ``connect`` makes the client of a shard."""
        self._standing = standing
        self._options = options
        self._incarnation = incarnation
        self._start, self._connect = start, connect
        self._security = standing.security.of(Role.SHARD)
        self._slices: dict[int, HostedSlice] = {}
        self._lock = threading.Lock()
        self._closing = False

    def __enter__(self) -> SliceHosting:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.leave()

    def offer(self) -> None:
        """Offers to host slices from the next registration on, if this machine has the certificate
        of a shard, or needs none. Raises InvalidArgument for options that a slice cannot have."""
        self._config(0)
        if self._security.encrypted:
            try:
                self._security.files.certificates()
            except InvalidArgument as error:
                log.warning("this worker cannot host a slice", reason=str(error))
                return
        self._standing.host = self.host
        self._standing.membership.hosts = True

    def host(self, slices: Sequence[int]) -> None:
        """Starts to serve ``slices``; does nothing for one that this process serves already."""
        with self._lock:
            for shard in slices:
                if self._closing or shard in self._slices:
                    continue
                log.info("hosts a slice", shard=shard)
                config = self._config(shard)
                self._slices[shard] = self._start(config, self._incarnation, self._ended)

    def _config(self, shard: int) -> ServeConfig:
        from pserver.process.config import ServeConfig

        return ServeConfig(
            shard=shard,
            coordinator=self._options.coordinator,
            advertise=self._options.advertise,
            run_dir=self._options.run_dir,
            connect_timeout_s=self._options.connect_timeout_s,
            security=self._security,
        )

    def connect(
        self, address: str, incarnation: int, plan: Plan, shard: int, **options: Any
    ) -> ShardClient:
        """Makes the client of a shard, which calls the engine of a slice of this process."""
        with self._lock:
            own = self._slices.get(shard)
        name = self._standing.security.common_name
        local = None if own is None else own.transport(incarnation, name)
        return self._connect(address, incarnation, plan, shard, local=local, **options)

    def leave(self) -> int:
        """Has the coordinator save the job, and ends all slices; a second call ends them at once.
        Hosts none from now on. Returns the number of slices that there were."""
        with self._lock:
            self._closing = True
            slices = list(self._slices.values())
        for each in slices:
            each.stop()
        for each in slices:
            if not each.join(END_S):
                log.warning("a slice has not ended", shard=each.shard)
        return len(slices)

    def _ended(self, ended: HostedSlice) -> None:
        with self._lock:
            self._slices.pop(ended.shard, None)
        if ended.error is not None:
            # A worker that goes on without its slice would leave the job without a host that the
            # supervisor starts again.
            self._standing.fail(ended.error)
