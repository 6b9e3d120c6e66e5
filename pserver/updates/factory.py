"""Makes the update engine that a job asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pserver.updates.engine import EngineKind, UpdateEngine
from psrpc.core.encoding import Encoding
from psrpc.core.plan import Plan

_SMALL_NBYTES = 4 << 20
"""Up to here one thread updates a shard as fast as several, which wait for each other, and takes
half of the CPU time: 80 000 parameters 33 against 53 µs, 230 000 with momentum 118 against 172."""

_THREADS = "TF_NUM_INTRAOP_THREADS"


def make_engine(
    kind: EngineKind,
    optimizer: Mapping[str, Any],
    plan: Plan,
    shard: int,
    wire: Encoding = "plain",
) -> UpdateEngine:
    """The engine ``kind`` for ``shard`` of ``plan``.

    ``wire`` is what gradients and snapshots will mostly be, beside plain: ``load`` compiles both.
    Others are compiled when they first come.

    ``optimizer`` is the job description's: ``keras.optimizers.serialize`` as plain JSON, see
    :mod:`pserver.updates.allowlist`. TensorFlow is imported for kind ``keras`` only.

    Raises:
        InvalidJob: the optimizer is not on the allow-list, or not what this engine can do.
    """
    if kind == "numpy":
        from pserver.updates.numpy_engine import NumpyEngine

        return NumpyEngine(optimizer, plan, shard)
    if "keras" not in sys.modules:
        # Arenas live in TensorFlow, whatever KERAS_BACKEND a user has for other programs.
        os.environ["KERAS_BACKEND"] = "tensorflow"
    fresh = "tensorflow" not in sys.modules
    if fresh:
        # Shards update on the CPU. TensorFlow would take memory of every GPU it sees from the
        # workers, and start more slowly.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        # Or it complains of a missing GPU driver as of an error.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from pserver.updates.keras_engine import KerasEngine
    from pserver.updates.keras_function import use_one_thread

    if fresh and plan.shard_nbytes(shard) <= _SMALL_NBYTES and _THREADS not in os.environ:
        use_one_thread()
    return KerasEngine(optimizer, plan, shard, wire)
