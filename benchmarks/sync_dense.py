"""Synchronous peers on one dense variable: PyTorch's DDP over gloo, and TensorFlow's ring.

    python -m benchmarks.sync_dense torch_ddp|tf_mwms dense_1x64MB_2w

The peers' own scripts have no such case. A round is that of :mod:`benchmarks.dense_job`: each
process computes ``1e-6 * v + 1e-9`` as its gradient, all take the mean, and each updates its copy
by SGD at 1e-3. The rate counts the micro-batches of all processes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.workloads import DENSE, WARMUP, Dense

SYSTEMS = ("torch_ddp", "tf_mwms")

ROUNDS = 40


def torch_ddp(dense: Dense, addresses: Sequence[str], index: int) -> Callable[[], None]:
    """Joins the group; returns a round."""
    host, _, port = addresses[0].rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    # Types of torch are there on some machines only.
    torch: Any = importlib.import_module("torch")

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // len(addresses)))
    torch.distributed.init_process_group("gloo", rank=index, world_size=len(addresses))

    class Gradient(torch.autograd.Function):  # type: ignore[misc]
        """0, with the gradient ``1e-6 * v + 1e-9``."""

        @staticmethod
        def forward(context: Any, value: Any) -> Any:
            context.save_for_backward(value)
            return value.new_zeros(())

        @staticmethod
        def backward(context: Any, _upstream: Any) -> Any:
            (value,) = context.saved_tensors
            return value * 1e-6 + 1e-9

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.ParameterList(
                torch.zeros(dense.shape) for _ in range(dense.count)
            )

        def forward(self) -> Any:
            return sum(Gradient.apply(value) for value in self.values)

    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def a_round() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return a_round


def tf_mwms(dense: Dense, addresses: Sequence[str], index: int) -> Callable[[], None]:
    """Joins the cluster; returns a round."""
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )
    import tensorflow as tf

    experimental = tf.distribute.experimental
    ring = experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(implementation=ring)
    )
    with strategy.scope():
        values = [tf.Variable(tf.zeros(dense.shape)) for _ in range(dense.count)]

    def replica() -> None:
        gradients = [1e-6 * value + 1e-9 for value in values]
        mean = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.MEAN, gradients
        )
        for value, gradient in zip(values, mean, strict=True):
            value.assign_sub(1e-3 * gradient)

    compiled = tf.function(lambda: strategy.run(replica))

    def a_round() -> None:
        compiled()

    return a_round


def member(system: str, dense: Dense, addresses: Sequence[str], index: int, out: Any) -> None:
    """Runs one process; the first one reports seconds a round."""
    join = torch_ddp if system == "torch_ddp" else tf_mwms
    a_round = join(dense, addresses, index)
    for _ in range(WARMUP):
        a_round()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        a_round()
    if index == 0:
        out.put((time.perf_counter() - began) / ROUNDS)


def free_address() -> str:
    """An address on this host that nothing listens at."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the JSON line of a peer's script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_dense", description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("case")
    options = parser.parse_args(argv)
    name, _, workers = options.case.rpartition("_")
    addresses = [free_address() for _ in range(int(workers.removesuffix("w")))]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=member, args=(options.system, DENSE[name], addresses, index, out))
        for index in range(len(addresses))
    ]
    for process in processes:
        process.start()
    round_s = out.get(timeout=300)
    for process in processes:
        process.join(60)
    report(options.case, round_s, len(addresses))


def report(case: str, round_s: float, workers: int) -> None:
    """Prints the rate of all workers as the peers' scripts do."""
    ms = 1e3 * round_s / workers
    line = {"workload": case, "ms": ms, "steps_per_s": round(1e3 / ms, 2)}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
