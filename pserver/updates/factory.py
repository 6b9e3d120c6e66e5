"""Makes the update engine of a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pserver.updates.engine import EngineKind, UpdateEngine
from psrpc.core.encoding import Encoding
from psrpc.core.plan import Plan
from psrpc.ops.extras import check_tensorflow
from psrpc.ops.process import may_choose_devices

_SMALL_NBYTES = 4 << 20
"""Shards up to this size are updated by one thread. Several threads are not faster, since they wait
for each other, and take twice the CPU time: one took 33 µs and several 53 µs for 80 000 parameters;
118 µs and 172 µs for 230 000 with momentum."""

_THREADS = "TF_NUM_INTRAOP_THREADS"


def make_engine(
    kind: EngineKind,
    optimizer: Mapping[str, Any],
    plan: Plan,
    shard: int,
    wire: Encoding = "plain",
    *,
    hosted: bool = False,
) -> UpdateEngine:
    """Makes the engine ``kind`` for ``shard`` of ``plan``.

    ``wire`` is the expected encoding of gradients and snapshots. ``load`` compiles for plain and
    for ``wire``; functions for other encodings are compiled at their first use. ``optimizer`` is
    the serialized optimizer of the job's description, see :mod:`pserver.updates.allowlist`. Only
    kind ``keras`` imports TensorFlow. ``hosted`` says that this process is a worker's, which
    chooses devices and threads for itself.

    Raises:
        InvalidJob: the optimizer is not on the allow-list, or this engine does not support it, or
            TensorFlow is not installed.
    """
    if kind == "numpy":
        from pserver.updates.numpy_engine import NumpyEngine

        return NumpyEngine(optimizer, plan, shard)
    check_tensorflow("the job's engine, keras,", "use engine numpy in the job")
    fresh = not hosted and may_choose_devices()
    if "keras" not in sys.modules:
        # The engine needs TensorFlow's variables, but a user's KERAS_BACKEND may name another
        # backend.
        os.environ["KERAS_BACKEND"] = "tensorflow"
    if fresh:
        # Shards update on the CPU. If TensorFlow saw a GPU, it would take GPU memory from the
        # workers, and start more slowly.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        # Otherwise TensorFlow logs a missing GPU driver as an error.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from pserver.updates.keras_engine import KerasEngine
    from pserver.updates.keras_objects import use_one_thread

    if fresh and plan.shard_nbytes(shard) <= _SMALL_NBYTES and _THREADS not in os.environ:
        use_one_thread()
    return KerasEngine(optimizer, plan, shard, wire, hosted=hosted)
