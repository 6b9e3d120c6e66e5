"""A shard in a worker's process: a slice of the parameters (``dense="allreduce"``)."""

from __future__ import annotations

import signal
from collections.abc import Callable

from pserver.engine.engine import ShardEngine
from pserver.process.config import ServeConfig
from pserver.process.ending import Ending
from pserver.process.shard import serve
from pserver.server.own_process import OwnProcess
from psrpc.core.errors import AlreadyExists, JobFailed, PsError, RemoteFailure, StaleGeneration
from psrpc.ops.exit_status import DONE
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS, Threads

log = get_logger()


class HostedSlice:
    """Serves one shard on a thread, as ``pserver serve`` does in a process. Thread-safe."""

    def __init__(
        self,
        config: ServeConfig,
        worker: int,
        ended: Callable[[HostedSlice], object],
        threads: Threads = THREADS,
        serves: Callable[..., None] = serve,
    ) -> None:
        """Args:
        config: with the credentials of a shard.
        worker: the incarnation of the worker's process.
        ended: called, on the slice's thread, when it has ended.
        serves: serves the shard until its end, see :func:`pserver.process.shard.serve`.
        """
        self.shard = config.shard
        self.error: PsError | None = None
        """Why the slice has ended, if that is the worker's end, too."""
        self._config = config
        self._worker = worker
        self._call_ended = ended
        self._serves = serves
        self._ending = Ending(threads)
        self._engine: ShardEngine | None = None
        self._thread = threads.thread(self._run, f"slice-{self.shard}")
        self._thread.start()

    def transport(self, incarnation: int, certificate: str) -> OwnProcess | None:
        """Returns the transport with which the worker, with the certificate of that common name,
        reaches this slice; None unless the slice has ``incarnation`` and serves."""
        engine = self._engine
        if engine is None or engine.identity.incarnation != incarnation:
            return None
        return OwnProcess(engine, f"shard {self.shard}", certificate, self._ending.event.is_set)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends the slice once the coordinator has saved the job; a second call ends it at once."""
        self._ending.stop(number)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _opened(self, engine: ShardEngine) -> None:
        self._engine = engine

    def _run(self) -> None:
        try:
            self._serves(self._config, self._ending, self._worker, self._opened)
        except (AlreadyExists, StaleGeneration) as error:
            log.info("another worker hosts the slice", shard=self.shard, reason=str(error))
        except JobFailed as error:
            # The worker hears of it, too.
            log.info("the slice has ended", shard=self.shard, reason=str(error))
        except PsError as error:
            self.error = error
        except Exception as error:
            log.exception("the slice has failed", shard=self.shard)
            self.error = RemoteFailure(f"shard {self.shard} in this process has failed: {error}")
        finally:
            self._ending.end(status=DONE)
            self._call_ended(self)
