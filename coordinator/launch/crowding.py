"""Checks that a machine has room for the processes of ``coordinator up``. Pure."""

from __future__ import annotations

from coordinator.membership.membership import MAX_ACTIVE
from psrpc.core.errors import InvalidArgument
from psrpc.core.tensor_form import MAX_SHARDS

WORKER_NBYTES = 250 << 20
"""Memory of a worker alone before it loads data or a model: TensorFlow's."""

SHARD_NBYTES = 75 << 20
"""Memory of a shard without parameters and without TensorFlow."""

WORKERS_PER_CORE = 4
"""More workers per core cause a warning; fewer may be intended, to try a cluster out."""


def check_counts(shards: int, workers: int) -> None:
    """Raises InvalidArgument for more shards or workers than a job can have."""
    for flag, count, most in (("shards", shards, MAX_SHARDS), ("workers", workers, MAX_ACTIVE)):
        if count > most:
            raise InvalidArgument(f"--{flag} is {count}; a job has {most} at most")


def crowded(shards: int, workers: int, cores: int, free_nbytes: int) -> list[str]:
    """Returns warnings about too many processes; none if the machine has room.

    Args:
        cores: cores that processes may use.
        free_nbytes: available memory.
    """
    found = []
    needed = workers * WORKER_NBYTES + shards * SHARD_NBYTES
    if needed > free_nbytes:
        found.append(
            f"--workers {workers} and --shards {shards} take {needed / 1e9:.1f} GB of memory at "
            f"least, and {free_nbytes / 1e9:.1f} GB are free; say fewer, or processes will be "
            "killed"
        )
    if workers > WORKERS_PER_CORE * cores:
        found.append(
            f"--workers {workers} share {cores} {'core' if cores == 1 else 'cores'}: more workers "
            "than cores train no faster, and each start takes seconds of one"
        )
    return found
