"""Runs one part of a TensorFlow peer on one of two hosts, by the functions of its own script.

    python -m benchmarks.split_peer PEERS PART CASE

The scripts start all their processes on one host. Here each part is started where it belongs, with
the addresses of :mod:`benchmarks.link`; models, steps and timing stay those of the scripts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.link import HOSTS

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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the part until it ends, or is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_peer", description=__doc__)
    parser.add_argument("peers", help="folder of the scripts")
    parser.add_argument("part", choices=["ps", "worker", "chief", "ring0", "ring1"])
    parser.add_argument("case")
    options = parser.parse_args(argv)
    sys.path.insert(0, options.peers)
    if options.part.startswith("ring"):
        script = importlib.import_module("sync_tf")
        name = options.case.rpartition("_")[0]
        out = Reported(script, options.case)
        script.train(name, len(RING), int(options.part[-1]), RING, out)
        return
    script = importlib.import_module("tf_ps")
    if options.part == "chief":
        chief(script, options.case)
    else:
        script.serve(SPEC, options.part, 0)


if __name__ == "__main__":
    main()
