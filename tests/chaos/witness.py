"""A model whose parameters say which batches they are made of.

It has two variables. Each shard, or slice, has an equal piece of both:

* of ``witness``, float32: one element for each batch of the job, then some of ``DRIFT``. The
  gradient of batch i moves element i, and no other, to 1. The drifting elements' gradients depend
  on the batch and on their own values, so that their last bits tell the order of updates.
* of ``pairs``, float64: elements that get +1 with each batch and as many that get -1, the first
  ones at one end of the piece and the others at the other end.

So a shard that lost a batch, had one twice, or gave out a mixture of two versions shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.policy import Policy
from psrpc.core.tables import TableSpec
from tests.coordinator.builders import description_json
from tests.pserver.shards import COMMON, SGD

Array = npt.NDArray[Any]
Optimizer = Literal["sgd", "momentum", "adam"]

BATCH_SIZE = 4
DRIFT = 32
WITNESS, PAIRS = "float32.trainable", "float64.trainable"
"""The arenas."""

VOCABULARY = 64
"""Ids of the table ``fixed``."""

INITIAL_ROW = 0.5
"""Every element of a row begins with this."""


@dataclass(frozen=True)
class Options:
    """One cluster and its job.

    Attributes:
        policy: what the job begins with. A round, if there are any, takes 1, 2 or 4 micro-batches.
        batches: of one epoch, a multiple of 16.
        pairs: elements on each shard that get +1, a multiple of 4.
        pace_ms: what a gradient takes.
        poisoned: the batch, counted over all epochs, whose gradient is not a number.
        tensorflow: trains ``keras_job`` instead of the witness model.
        data: shards take data connections, which workers use that share no memory with them.
        rows: it has embedding tables, see :mod:`tests.chaos.row_witness`.
        devices: batches that each worker computes at once.
        sums: workers push the sums of their gradients (async).
        exact: workers push each gradient of a round by itself (sync), else the sum of theirs. Of
            rounds of two that has the same bits, since only powers of two are multiplied.
        change: what a person changes the policy to, once the job has been seen at the global step
            ``change_step``; all policies of such a job apply one gradient at a time.
        hosted: workers host the shards, as slices; with ``rows`` as many slices beside the shards.
    """

    policy: Policy
    shards: int
    workers: int
    optimizer: Optimizer
    epochs: int
    batches: int
    pairs: int
    shm: bool
    checkpoint_every: int
    pace_ms: int
    poisoned: int | None = None
    tensorflow: bool = False
    data: bool = False
    rows: bool = False
    devices: int = 1
    sums: bool = False
    exact: bool = True
    change: Policy | None = None
    change_step: int = 0
    hosted: bool = False

    def __str__(self) -> str:
        change = "" if self.change is None else f" -> {self.change} (step {self.change_step})"
        model = "TensorFlow" if self.tensorflow else self.optimizer
        tables = " with tables" if self.rows else ""
        devices = f" of {self.devices} devices" if self.devices > 1 else ""
        devices += " (sums)" if self.sums or not self.exact else ""
        poisoned = "" if self.poisoned is None else f" NaN in batch {self.poisoned}"
        shards = "slices" if self.hosted else "shards"
        shards = "shards and slices" if self.slices else shards
        tcp = "data connections" if self.data else "tcp"
        return (
            f"{self.policy}{change} {self.shards} {shards} {self.workers} workers{devices} "
            f"{model}{tables} {self.epochs}x{self.batches} batches {'shm' if self.shm else tcp} "
            f"checkpoint every {self.checkpoint_every}{poisoned}"
        )

    @property
    def total_batches(self) -> int:
        """Of all epochs."""
        return self.epochs * self.batches

    @property
    def total_steps(self) -> int:
        """Global steps of the job."""
        return self.total_batches // self.policy.taken

    @property
    def fixed(self) -> bool:
        """Whether it is known which batches make a round: the data alone decides."""
        return self.policy.rounds and not self.policy.backups and self.change is None

    @property
    def shard_names(self) -> list[str]:
        """``shard-0`` …; none where workers host them."""
        alone = self.hosted and not self.rows
        return [] if alone else [f"shard-{shard}" for shard in range(self.shards)]

    @property
    def slices(self) -> int:
        """Slices beside the shards: piece k of the variables is on slice k, which follows them, and
        the rows that go with it are on shard k."""
        return self.shards if self.hosted and self.rows else 0

    @property
    def worker_names(self) -> list[str]:
        """``worker-a`` …"""
        return [f"worker-{letter}" for letter in "abcdefgh"[: self.workers]]

    @property
    def plan(self) -> Plan:
        """Where the variables are."""
        total = self.shards + self.slices
        return make_plan(self.variables, total, "cut", self.tables, self.slices)

    @property
    def variables(self) -> tuple[VariableSpec, ...]:
        """As the plan knows them."""
        return (
            VariableSpec("witness", (self.shards * self.piece,), "float32", "trainable"),
            VariableSpec("pairs", (self.shards * 2 * self.pairs,), "float64", "trainable"),
        )

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """As the plan knows them, a growing one and a fixed one; or none."""
        start = {"class_name": "constant", "config": {"value": INITIAL_ROW}}
        optimizer = optimizer_config(self.optimizer)
        growing = TableSpec("growing", 3, None, start, optimizer)
        fixed = TableSpec("fixed", 5, VOCABULARY, start, optimizer)
        return (growing, fixed) if self.rows else ()

    @property
    def piece(self) -> int:
        """Elements of ``witness`` on one shard: the batches', those that drift, and padding."""
        return -(-(self.total_batches + DRIFT) // 16) * 16

    def to_json(self) -> str:
        """For the processes of the cluster."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Options:
        """The inverse of :meth:`to_json`."""
        given = json.loads(text)
        for name in ("policy", "change"):
            given[name] = given[name] and Policy(**given[name])
        return Options(**given)

    def number(self, batch: BatchId) -> int:
        """Of a batch, counted over all epochs."""
        return batch.epoch * self.batches + batch.first // BATCH_SIZE


def optimizer_config(name: Optimizer) -> dict[str, Any]:
    """The optimizer as Keras serializes it."""
    if name == "adam":
        own = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}
        return {"class_name": "Adam", "config": COMMON | own | {"learning_rate": 0.01}}
    momentum = 0.9 if name == "momentum" else 0.0
    return SGD | {"config": SGD["config"] | {"momentum": momentum}}


def description(options: Options) -> dict[str, Any]:
    """The output that ``worker describe`` would have for this job."""
    # Jobs without tables have no such key.
    tables = {"tables": [table.to_json() for table in options.tables]} if options.rows else {}
    return description_json(
        **tables,
        **options.policy.to_json(),
        name="witness",
        job_sha256=hashlib.sha256(options.to_json().encode()).hexdigest(),
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        train_records=options.batches * BATCH_SIZE,
        data_fingerprint="witness",
        variables=[vars(v) | {"shape": list(v.shape)} for v in options.variables],
        optimizer=optimizer_config(options.optimizer),
        checkpoint_every=options.checkpoint_every,
        total_updates=options.total_steps,
        exact=options.exact,
        dense="allreduce" if options.hosted else "shards",
        slices=options.slices or None,
    )


def initial_values(options: Options) -> dict[str, Array]:
    """Zeros: arena name -> ``[length]``."""
    return {arena.name: np.zeros(arena.length, arena.dtype) for arena in options.plan.arenas}


def gradient(options: Options, batch: int, shard: int, values: Array) -> dict[str, Array] | None:
    """The gradient of ``batch`` for ``shard``; None if it is not finite.

    Args:
        values: the shard's part of ``witness``, ``[piece]``.
    """
    if batch == options.poisoned:
        return None
    by = scale(options, batch)
    witness = np.zeros(options.piece, np.float32)
    witness[batch] = -by
    drift = slice(options.total_batches, options.total_batches + DRIFT)
    push = np.float32(((batch * 37 + shard) % 101 - 50) / 64)
    witness[drift] = push * np.arange(1, DRIFT + 1, dtype=np.float32) / np.float32(DRIFT)
    witness[drift] += values[drift] * np.float32(0.3)
    pairs = np.empty(2 * options.pairs)
    pairs[: options.pairs] = -by
    pairs[options.pairs :] = by
    return {WITNESS: witness, PAIRS: pairs}


def scale(options: Options, batch: int) -> int:
    """Of how many gradients the mean is taken that this one is part of."""
    taken, poisoned = options.policy.taken, options.poisoned
    together = poisoned is not None and poisoned // taken == batch // taken
    return taken - together


class Torn(AssertionError):
    """Parameters that no shard may ever show."""


def check_values(options: Options, values: Mapping[str, Array], round_number: int | None) -> None:
    """Checks the invariants of every pull.

    Args:
        values: whole arenas, by name.
        round_number: whose parameters these are, where it is known which batches make a round;
            otherwise None.

    Raises:
        Torn: says what was found.
    """
    witness = values[WITNESS].reshape(options.shards, options.piece)
    pairs = values[PAIRS].reshape(options.shards, 2, options.pairs)
    for shard in range(options.shards):
        who = f"shard {shard}"
        plus, minus = pairs[shard]
        if (plus != plus[0]).any() or (minus != -plus[0]).any():
            raise Torn(f"{who}: the pairs do not sum to zero: {plus[0]} {minus[0]} {plus[-1]}")
        ones = witness[shard, : options.total_batches]
        if options.optimizer == "sgd":
            wrong = np.flatnonzero((ones != 0) & (ones != 1))
            if len(wrong):
                raise Torn(f"{who} has batch {wrong[0]} as {ones[wrong[0]]}")
            if ones.sum() != plus[0]:
                raise Torn(f"{who} has {ones.sum():g} batches and {plus[0]:g} updates")
        if round_number is not None:
            have = set(np.flatnonzero(ones).tolist())
            expected = set(range(round_number * options.policy.taken)) - {options.poisoned}
            if have != expected:
                odd = sorted(have ^ expected)
                raise Torn(f"{who} at round {round_number} differs in batches {odd[:8]}")
    if round_number is not None:
        for shard in range(1, options.shards):
            if (pairs[shard] != pairs[0]).any():
                raise Torn(f"shards 0 and {shard} of round {round_number} are of two versions")
