"""Runs one part of a peer on one of two hosts, by the functions of its own script.

    python -m benchmarks.split_peer PEERS PART CASE

The scripts start all their processes on one host. Here each part is started where it belongs, with
the addresses of :mod:`benchmarks.link`; models, steps and timing stay those of the scripts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import sync_dense
from benchmarks.link import HOSTS
from benchmarks.workloads import DENSE

SPEC = {
    "ps": [f"{HOSTS['near']}:6001"],
    "worker": [f"{HOSTS['far']}:6002"],
    "chief": [f"{HOSTS['near']}:6003"],
}
RING = [f"{HOSTS['near']}:6004", f"{HOSTS['far']}:6005"]


def chief(script: Any, case: str) -> None:
    """Times ``case`` on the servers of :data:`SPEC`."""

    class Remote:
        """Has the interface of the script's ``Cluster``, whose servers run already."""

        def __init__(self, workers: int) -> None:
            assert workers == len(SPEC["worker"])
            import tensorflow as tf  # After the script has set its environment

            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(SPEC), task_type="chief", task_id=0, rpc_layer="grpc"
            )
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
            self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

        def close(self) -> None:
            """Leaves the servers to the caller."""

    script.Cluster = Remote
    if case.startswith("mnist"):
        script.mnist(case.rpartition("_")[0], 1)
    else:
        script.micro(case)


class Reported:
    """Takes the rate of a ring and reports it as the script's main program does."""

    def __init__(self, script: Any, case: str) -> None:
        self._script = script
        self._case = case

    def put(self, rate: float) -> None:
        """Prints the JSON line."""
        self._script.report("tf_mwms", self._case, 1e3 / rate, steps_per_s=round(rate, 1))


class DenseReported:
    """Takes the seconds of a round of :mod:`benchmarks.sync_dense` and reports the rate."""

    def __init__(self, case: str) -> None:
        self._case = case

    def put(self, round_s: float) -> None:
        """Prints the JSON line."""
        sync_dense.report(self._case, round_s, len(RING))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the part until it ends, or is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_peer", description=__doc__)
    parser.add_argument("peers", help="folder of the scripts")
    parts = ["ps", "worker", "chief", "ring0", "ring1", "ddp0", "ddp1"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("case")
    options = parser.parse_args(argv)
    sys.path.insert(0, options.peers)
    name, index = options.case.rpartition("_")[0], options.part[-1]
    if name in DENSE and index in "01":
        system = "torch_ddp" if options.part.startswith("ddp") else "tf_mwms"
        # By default gloo takes the address of the machine's name, which is the same on both hosts.
        [link] = [name for _, name in socket.if_nameindex() if name != "lo"]
        os.environ["GLOO_SOCKET_IFNAME"] = link
        sync_dense.member(system, DENSE[name], RING, int(index), DenseReported(options.case))
        return
    if options.part.startswith("ring"):
        script = importlib.import_module("sync_tf")
        script.train(name, len(RING), int(index), RING, Reported(script, options.case))
        return
    script = importlib.import_module("tf_ps")
    if options.part == "chief":
        chief(script, options.case)
    else:
        script.serve(SPEC, options.part, 0)


if __name__ == "__main__":
    main()
