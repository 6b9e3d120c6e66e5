"""Runs a worker with a job's model."""

from __future__ import annotations

from worker.job.loader import LoadedJob
from worker.loop.performer import Performer
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.runtime.devices import Device
from worker.step.keras_source import KerasSource


class Trainer:
    """Performs the coordinator's leases until the job ends. One thread uses it."""

    def __init__(
        self,
        loaded: LoadedJob,
        device: Device,
        standing: WorkerSession,
        times: StepTimes | None = None,
        *,
        shm: bool = True,
        slow_down: float = 1.0,
    ) -> None:
        """``shm`` shares memory with shards on this host. ``slow_down`` multiplies the compute time
        of every step."""
        self._loaded = loaded
        self._device = device
        self._standing = standing
        self._times = times
        self._shm = shm
        self._slow_down = slow_down

    def run(self) -> None:
        """Works until the job ends, leaves it, and raises.

        Raises:
            Stopped: the job is done, or the process was told to leave.
            JobFailed: the job has failed.
            InvalidJob: the user's code or data failed, which fails the job for all workers.
            PsError: any other error that ends this worker.
        """
        with (
            KerasSource(
                self._loaded.job,
                self._device,
                self._standing.waits,
                self._loaded.optimizer_arguments,
            ) as source,
            Performer(
                source,
                self._standing,
                self._loaded.sha256,
                self._device.label,
                self._times,
                shm=self._shm,
                slow_down=self._slow_down,
                prefetch_rows=self._loaded.job.prefetch_rows,
            ) as performer,
        ):
            performer.run()
