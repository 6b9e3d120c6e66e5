"""What a seed implies: the job, the cluster, and the faults that may happen to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Literal

from tests.sim.faults import PLANNED, RATES

MOST_BATCHES = 20
"""Updates of one run: with more, the sums of the witness would not be exact in float32."""


@dataclass(frozen=True)
class Options:
    """``batches`` are of one epoch, ``skipped`` indices into those of the whole job. ``rates`` are
    chances of faults by kind, ``planned`` how many there are of those that come at set moments.
    Things go wrong for ``faults_s``, from when training begins, or with ``early`` from the start.
    ``patience_s`` is how long a worker waits for a shard; with ``shared_memory`` it joins anew
    after a call that had no answer. ``far`` has the processes that messages take long to, and how
    long at most."""

    mode: Literal["async", "sync"]
    shards: int
    workers: int
    replicas: int
    batches: int
    epochs: int
    batch_size: int
    records: int
    checkpoint_every: int
    keep_checkpoints: int
    eval_records: int
    keeps_best: bool
    momentum: bool
    skipped: tuple[int, ...]
    batch_s: float
    heartbeat_s: float
    patience_s: float
    shared_memory: bool
    far: Mapping[str, float]
    early: bool
    faults_s: float
    rates: Mapping[str, float]
    planned: Mapping[str, int]

    @property
    def total_batches(self) -> int:
        """Of the whole job."""
        return self.batches * self.epochs

    @property
    def total_updates(self) -> int:
        """Global steps of the whole job."""
        if self.mode == "async":
            return self.total_batches
        return -(-self.batches // self.replicas) * self.epochs

    @property
    def expected_s(self) -> float:
        """About how long training takes if all goes well."""
        return 0.5 + self.total_batches * self.batch_s / min(self.workers, self.replicas or 4)

    def __str__(self) -> str:
        named = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                value = ",".join(f"{k}:{v:.3g}" for k, v in value.items()) or "none"
            named.append(
                f"{field.name}={value:.3g}" if isinstance(value, float) else f"{field.name}={value}"
            )
        return " ".join(named)


def draw(random: Random) -> Options:
    """Options as ``random`` has them."""
    mode: Literal["async", "sync"] = random.choice(("async", "sync"))
    batches = random.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 9))
    epochs = random.randint(1, min(4, MOST_BATCHES // batches))
    batch_size = random.randint(1, 3)
    total = batches * epochs
    skipped = []
    if total > 1 and random.random() < 0.2:
        skipped = random.sample(range(total), random.randint(1, min(2, total - 1)))
    calm = random.random() < 0.05
    rates = {}
    for kind, (least, greatest) in RATES.items():
        # Few kinds at a time, so that one does not hide what another would bring about.
        if not calm and random.random() < 0.4:
            rates[kind] = least * (greatest / least) ** random.random()
    planned = {}
    for kind in PLANNED:
        if not calm and random.random() < 0.3:
            planned[kind] = random.randint(1, 2)
    shards, workers = random.randint(1, 3), random.randint(1, 4)
    far = {}
    if not calm and random.random() < 0.3:
        names = [f"shard-{index}" for index in range(shards)]
        names += [f"worker-{index}" for index in range(workers)]
        far[random.choice((*names, "coordinator"))] = random.choice((0.2, 1.0, 3.0))
    return Options(
        mode=mode,
        shards=shards,
        workers=workers,
        replicas=random.randint(1, 4) if mode == "sync" else 0,
        batches=batches,
        epochs=epochs,
        batch_size=batch_size,
        records=batches * batch_size - random.randint(0, batch_size - 1),
        checkpoint_every=random.choice((1, 1, 2, 2, 3, 6)),
        keep_checkpoints=random.choice((1, 2, 5)),
        eval_records=random.choice((0, 0, 2, 5000)),
        keeps_best=random.random() < 0.3,
        momentum=random.random() < 0.5,
        skipped=tuple(sorted(skipped)),
        batch_s=random.choice((0.05, 0.3, 1.0)),
        heartbeat_s=random.choice((1.0, 2.0, 3.0)),
        patience_s=120.0,
        shared_memory=random.random() < 0.3,
        far=far,
        early=random.random() < 0.25,
        faults_s=random.uniform(3.0, 20.0),
        rates=rates,
        planned=planned,
    )
