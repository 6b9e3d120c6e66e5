"""Whether shards and coordinator answer while a push of 1 GB is in flight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import numpy as np

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.latency import Answers, Probe, answers_during
from benchmarks.scaling import TRANSPORTS
from benchmarks.table import MISSING, OURS, markdown, number
from benchmarks.workloads import Dense, Transport
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.net.channel import open_channel
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from psrpc.wire.status import error_from_rpc

PARAMETERS = Dense(1, (256 << 20,), steps=10)
TARGET_MS = 200.0
CALL_S = 10.0
PAUSE_S = 0.1


@dataclass(frozen=True)
class AnswerSample:
    """How long the calls of one kind took during exchanges; or why that is not known."""

    transport: Transport
    call: str
    answers: Answers | None = None
    miss: str = ""


def measure() -> Iterator[AnswerSample]:
    for transport in TRANSPORTS:
        try:
            yield from run_case(transport)
        except RunFailed as error:
            yield AnswerSample(transport, "all", miss=str(error))


def run_case(transport: Transport) -> list[AnswerSample]:
    """One worker, one shard, all parameters in one push; small calls from beside."""
    with (
        Cluster(PARAMETERS, transport=transport) as cluster,
        CoordinatorClient(cluster.address(), cluster.security()) as coordinator,
        CoordinatorClient(cluster.address(), cluster.security(Role.WORKER)) as worker,
        open_channel(_shard_address(cluster, coordinator), cluster.security()) as shard,
        ExitStack() as stack,
    ):
        probes = [
            stack.enter_context(Probe(name, call))
            for name, call in _calls(coordinator, worker, shard).items()
        ]
        windows = np.concatenate([steps.exchanges() for steps in cluster.wait()])
    return [
        AnswerSample(transport, probe.name, answers_during(probe.made(), windows))
        for probe in probes
    ]


def table(samples: Sequence[AnswerSample]) -> str:
    """Markdown."""
    rows = [[f"{s.call}, {OURS[s.transport]}", *_cells(s)] for s in samples]
    title = f"While {PARAMETERS.nbytes >> 20} MB are pushed and pulled; milliseconds.\n\n"
    return title + markdown(["call", "calls", "p99", "max", f"≤ {TARGET_MS:.0f} ms"], rows) + "\n"


def _cells(sample: AnswerSample) -> list[str]:
    found = sample.answers
    if found is None or not found.count:
        return [MISSING, MISSING, MISSING, sample.miss or "no call met an exchange"]
    verdict = "met" if found.max_ms <= TARGET_MS else "**missed**"
    return [f"{found.count}", number(found.p99_ms), number(found.max_ms), verdict]


def _shard_address(cluster: Cluster, coordinator: CoordinatorClient) -> str:
    """Of the one shard, once it serves."""
    while cluster.running:
        with contextlib.suppress(PsError):
            shard = coordinator.get_job_status().shards[0]
            if shard.state == "ready":
                return shard.address
        time.sleep(PAUSE_S)
    cluster.wait()
    raise RunFailed("the job ended before its shard was ready")


def _calls(
    coordinator: CoordinatorClient, worker: CoordinatorClient, shard: grpc.Channel
) -> dict[str, Callable[[], object]]:
    """One call for each thing that has to be answered in time."""
    stub = parameter_server_pb2_grpc.ParameterServerStub(shard)  # type: ignore[no-untyped-call]  # generated
    # No worker has this session; the answer says so, and takes the same way.
    heartbeat = coordinator_pb2.HeartbeatWorkerRequest(session=b"a probe")

    def get_status() -> None:
        try:
            stub.GetStatus(parameter_server_pb2.GetStatusRequest(), timeout=CALL_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error, "the shard") from None

    return {
        "shard GetStatus": get_status,
        "coordinator GetJobStatus": coordinator.get_job_status,
        "coordinator HeartbeatWorker": lambda: worker.heartbeat_worker(heartbeat),
    }
