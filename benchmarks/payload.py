"""How many bytes of tensors a worker of a job sends and receives in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pserver.transport.workspace import Workspace
from psrpc.core.batch import cut_batch
from psrpc.core.encoding import wire_encoding
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from worker.describe.describe import describe
from worker.job.loader import load_job
from worker.runtime.waits import WorkerWaits


@dataclass(frozen=True)
class Payload:
    """Bytes of one step, of all shards together; headers, below a kilobyte, are not counted.

    Attributes:
        push_nbytes: the gradient, as it travels.
        pull_nbytes: the parameters, as they travel.
    """

    push_nbytes: int
    pull_nbytes: int

    @property
    def nbytes(self) -> int:
        """Both ways."""
        return self.push_nbytes + self.pull_nbytes


def measure_payload(path: Path, shards: int, settings: Sequence[str]) -> Payload:
    """Counts them on what a worker holds after the first step of the job at ``path``, ``settings``
    (``key=value``) applied: the real gradient, and the arrays that parameters are received into.
    """
    # These import TensorFlow, which tables need not.
    from worker.runtime.devices import HOST, Device
    from worker.step.compute import BatchReader, GradientComputer
    from worker.step.replica import Replica

    loaded = load_job(path, settings)
    job = loaded.job
    described = describe(loaded)
    variables = [VariableSpec(**(v | {"shape": tuple(v["shape"])})) for v in described["variables"]]
    plan = make_plan(variables, shards, described["placement"])
    replica = Replica(job)
    device = Device(HOST, "CPU")
    workspace = Workspace(plan, wire_encoding(job.wire_dtype), shared=False)
    read = BatchReader(job, device, replica.num_seeds())
    with GradientComputer(
        replica, plan, device, read, WorkerWaits(lambda _reason, _waited_s: None)
    ) as compute:
        compute.renew(workspace)
        for name, values in replica.values(plan).items():
            compute.spare.arrays[name][:] = values
        compute.swap()
        batch = cut_batch(0, 0, job.train.num_records, job.batch_size)
        gradients = compute.gradient(batch, compute.read(batch)).gradients
    (received, _) = workspace.sets
    return Payload(
        push_nbytes=sum(part.nbytes for gradient in gradients for part in gradient.values()),
        pull_nbytes=sum(array.nbytes for array in received.values()),
    )
