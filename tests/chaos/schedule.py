"""From a seed to the cluster that it runs and the faults that it meets. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from psrpc.core.policy import ASYNC, Policy
from tests.chaos.witness import Optimizer, Options

Kind = Literal[
    "kill", "drain", "stop", "replace", "reset", "partition", "swallow", "refuse", "full"
]

STARTING = -1
"""``Fault.step`` of a fault that does not wait for training to begin."""

ENDING = -2
"""Of one that comes while the job ends; it may be too late."""

LONGEST_S = 10.0
"""All waits of a schedule together stay well below this; training itself takes about 2 s."""

GATE = 0.9
"""Batches from this part of the job on wait until the last fault has been dealt with."""

TABLES = 0.4
"""The part of all jobs that has embedding tables."""

DRAINS = 0.25
"""The part of all kills in whose place processes get SIGTERM."""

DATA = 0.75
"""The part of all jobs whose shards take data connections."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        targets: processes (``coordinator``, ``shard-0``, ``worker-a``) or, for the network's
            faults, links (``shard-0``: all workers' connections to it; ``coordinator/worker-a``:
            that worker's to the coordinator). Empty for the disk.
        step: it comes once the job has been seen at this global step; ``STARTING`` is at once.
        after_s: and so long after that, or after the fault before it, whichever is later.
        lasts_s: how long a process stays stopped or absent, a link or the disk unusable.
        ends: what becomes of a process that was stopped (``cont`` or ``kill``), of connections
            that were silent (``cont`` or ``reset``).
    """

    kind: Kind
    targets: tuple[str, ...]
    step: int
    after_s: float
    lasts_s: float = 0.0
    ends: Literal["cont", "kill", "reset"] = "cont"

    def __str__(self) -> str:
        when = {STARTING: "at the start", ENDING: "at the end"}.get(self.step, f"step {self.step}")
        lasts = f" for {self.lasts_s:.2f} s, {self.ends}" if self.lasts_s else ""
        what = f"{self.kind} {'+'.join(self.targets)}".strip()
        return f"{what} ({when} +{self.after_s:.2f} s{lasts})"


@dataclass(frozen=True)
class Schedule:
    """The job, cluster and faults that a seed stands for."""

    seed: int
    options: Options
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults)) or "no fault"
        return f"{self.options}: {faults}"


def make_schedule(
    seed: int, *, disk: bool = True, tensorflow: bool = False, hosted: bool = False
) -> Schedule:
    """The schedule of ``seed``.

    Args:
        disk: a file system can be filled up here.
        tensorflow: with workers that use it; fewer kinds of clusters, and seeds of their own.
        hosted: workers host the shards; the same of this.
    """
    if hosted:
        return _hosted_schedule(random.Random(f"hosted {seed}"), seed, disk)
    rng = random.Random(f"{seed} {tensorflow}")
    options = _tensorflow_options(rng) if tensorflow else _options(rng)
    # Drawn on their own, so that seeds have the clusters that they had without policies.
    policies = random.Random(f"policies {seed}")
    if not tensorflow:
        options = _with_policies(policies, options)
        options = replace(options, rows=random.Random(f"tables {seed}").random() < TABLES)
        options = _with_devices(random.Random(f"devices {seed}"), options)
        options = _with_sums(random.Random(f"exact {seed}"), options)
    options = replace(options, data=random.Random(f"data {seed}").random() < DATA)
    faults = _with_change(policies, options, _faults(rng, options, disk))
    return Schedule(seed, options, _with_drains(random.Random(f"drains {seed}"), faults))


def _hosted_schedule(rng: random.Random, seed: int, disk: bool) -> Schedule:
    options = _options(rng)
    policy = Policy(mode="sync", replicas=rng.choice((1, 2, 4)))
    if rng.random() < 0.3:
        policy = _varied(rng, policy)
    if policy.taken == 4 or policy.backups:
        options = replace(options, poisoned=None)
    shards = min(options.shards, options.workers)
    rows = random.Random(f"hosted tables {seed}").random() < TABLES
    data = rows and random.Random(f"data {seed}").random() < DATA
    options = replace(options, policy=policy, shards=shards, hosted=True, rows=rows, data=data)
    options = _with_sums(random.Random(f"exact {seed}"), _with_devices(rng, options))
    return Schedule(seed, options, _with_drains(rng, _faults(rng, options, disk)))


def links(options: Options) -> list[str]:
    """Every link of a cluster."""
    members = [*options.shard_names, *options.worker_names]
    return [*options.shard_names, *(f"coordinator/{member}" for member in members)]


def _options(rng: random.Random) -> Options:
    mode: Literal["async", "sync"] = rng.choice(("async", "sync"))
    replicas = rng.choice((1, 2, 4)) if mode == "sync" else None
    optimizer: Optimizer = rng.choices(("sgd", "momentum", "adam"), (4, 1, 1))[0]
    workers = rng.randint(1, 3)
    epochs = rng.choice((1, 1, 2))
    batches = rng.choice((64, 96, 128)) // epochs
    # A batch whose gradient is not a number; the mean of what is left of a round of four is not
    # exact any more.
    poisoned = rng.randrange(batches * epochs) if rng.random() < 0.2 and replicas != 4 else None
    return Options(
        policy=Policy(mode=mode, replicas=replicas),
        shards=rng.randint(1, 3),
        workers=workers,
        optimizer=optimizer,
        epochs=epochs,
        batches=batches,
        pairs=rng.choice((64, 64, 64, 40_000)),
        shm=rng.random() < 0.5,
        checkpoint_every=rng.choice((5, 10, 20)),
        pace_ms=rng.choice((5, 10)) * workers,
        poisoned=poisoned,
    )


def _tensorflow_options(rng: random.Random) -> Options:
    mode: Literal["async", "sync"] = rng.choice(("async", "sync", "sync"))
    return Options(
        policy=Policy(mode=mode, replicas=2 if mode == "sync" else None),
        shards=rng.randint(1, 2),
        workers=rng.randint(1, 2),
        optimizer="adam",
        epochs=1,
        batches=96,
        pairs=0,
        shm=rng.random() < 0.5,
        checkpoint_every=10,
        pace_ms=20,
        tensorflow=True,
    )


def _with_policies(rng: random.Random, options: Options) -> Options:
    """The same cluster, often under another policy than a plain one, or under two."""
    policy = options.policy
    if rng.random() < 0.5:
        policy = _varied(rng, policy)
    if policy.backups:
        # Which batches a poisoned one meets in its round is not known.
        options = replace(options, poisoned=None)
    options = replace(options, policy=policy)
    if policy.taken > 1 or rng.random() < 0.5:
        return options
    step = rng.randint(0, int(options.total_steps * GATE) - 1)
    plain = rng.choice((ASYNC, Policy(mode="sync", replicas=1)))
    change = _varied(rng, plain) if plain.rounds == policy.rounds else plain
    if change.taken > 1:
        change = replace(change, aggregate=1, speculate=False)
    return replace(options, change=change, change_step=step)


def _with_devices(rng: random.Random, options: Options) -> Options:
    """The same cluster, often with workers of several devices, where nothing excludes them."""
    modes = {each.mode for each in (options.policy, options.change) if each is not None}
    if options.rows or "ssp" in modes or rng.random() < 0.4:
        return options
    sums = "async" in modes and options.optimizer == "sgd"
    return replace(options, devices=rng.choice((2, 3)), sums=sums and rng.random() < 0.6)


def _with_sums(rng: random.Random, options: Options) -> Options:
    """The same cluster, often with sums of a round, where a sum has the bits of its summands."""
    policy = options.policy
    if policy != Policy(mode="sync", replicas=2) or options.change is not None:
        return options
    return replace(options, exact=rng.random() < 0.3)


def _varied(rng: random.Random, policy: Policy) -> Policy:
    if not policy.rounds:
        return rng.choice(
            (
                Policy(max_staleness=rng.choice((0, 1, 4))),
                Policy(mode="ssp", staleness=rng.choice((0, 1, 3))),
            )
        )
    taken = policy.taken
    return rng.choice(
        (
            replace(policy, speculate=True),
            replace(policy, replicas=taken + rng.choice((1, 2)), aggregate=taken),
        )
    )


def _faults(rng: random.Random, options: Options, disk: bool) -> tuple[Fault, ...]:
    if rng.random() < 0.04:
        return ()
    count = rng.choices((1, 2, 3, 4), (2, 4, 3, 2))[0]
    last = int(options.total_steps * GATE) - 1
    steps = sorted(rng.randint(0, max(0, last)) for _ in range(count))
    faults: list[Fault] = []
    left_s = LONGEST_S - 4.0
    for index, step in enumerate(steps):
        at = STARTING if index == 0 and rng.random() < 0.12 else step
        if faults and rng.random() < 0.3:
            # Into the middle of whatever the fault before it has set off.
            at = faults[-1].step
        fault = _fault(rng, options, at, disk and not any(f.kind == "full" for f in faults))
        if fault.after_s + fault.lasts_s <= left_s:
            left_s -= fault.after_s + fault.lasts_s
            faults.append(fault)
    if rng.random() < 0.2:
        victims = _victims(rng, options)
        faults.append(Fault("kill", victims, ENDING, rng.uniform(0, 0.4), 0.1))
    return tuple(faults)


def _with_change(
    rng: random.Random, options: Options, faults: tuple[Fault, ...]
) -> tuple[Fault, ...]:
    """Adds, mostly, the death of a process while the policy is changed."""
    if options.change is None or rng.random() < 0.3:
        return faults
    step, after_s = options.change_step, rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.4)))
    kill = Fault("kill", _victims(rng, options), step, after_s, rng.choice((0.0, 0.1)))
    place = sum(fault.step <= step and fault.step != ENDING for fault in faults)
    return (*faults[:place], kill, *faults[place:])


def _with_drains(rng: random.Random, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The same faults, some of which let processes save and leave."""
    return tuple(
        replace(fault, kind="drain") if fault.kind == "kill" and rng.random() < DRAINS else fault
        for fault in faults
    )


def _fault(rng: random.Random, options: Options, step: int, disk: bool) -> Fault:
    kinds: list[Kind] = ["kill", "stop", "replace", "reset", "partition", "swallow", "refuse"]
    # With TensorFlow leases are as long as by default: no process is replaced within a schedule.
    weights = [10, 4, 0 if options.tensorflow else 2, 3, 2, 3, 1]
    if disk:
        kinds.append("full")
        weights.append(2)
    kind = rng.choices(kinds, weights)[0]
    after_s = rng.choice((0.0, 0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.0)))
    if kind == "kill":
        return Fault(kind, _victims(rng, options), step, after_s, rng.choice((0.0, 0.1, 0.5)))
    if kind == "stop":
        ends: Literal["cont", "kill"] = rng.choice(("cont", "cont", "kill"))
        # Leases are 1.5 s: some of these are shorter, some longer.
        lasts_s = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.6, 3.0)))
        return Fault(kind, _victims(rng, options), step, after_s, lasts_s, ends)
    if kind == "replace":
        members = (*options.shard_names, *options.worker_names)
        return Fault(kind, (rng.choice(members),), step, after_s, rng.uniform(1.9, 3.5))
    if kind == "full":
        return Fault(kind, (), step, after_s, rng.uniform(0.3, 1.5))
    every = links(options)
    some = rng.sample(every, min(len(every), rng.choice((1, 1, 2))))
    if kind == "reset":
        return Fault(kind, tuple(some), step, after_s)
    if kind == "swallow":
        return Fault(kind, tuple(some), step, after_s, rng.uniform(0.05, 0.5))
    if kind == "refuse":
        return Fault(kind, tuple(some), step, after_s, rng.uniform(0.2, 1.0))
    end: Literal["cont", "reset"] = rng.choice(("cont", "reset"))
    lasts_s = rng.choice((rng.uniform(0.1, 1.0), rng.uniform(1.6, 3.0)))
    return Fault(kind, tuple(some), step, after_s, lasts_s, end)


def _victims(rng: random.Random, options: Options) -> tuple[str, ...]:
    """One process, mostly; or several, or all of a role, or all there are."""
    everyone = ("coordinator", *options.shard_names, *options.worker_names)
    hosts = options.shard_names or options.worker_names
    chance = rng.random()
    if chance < 0.2:
        return ("coordinator",)
    if chance < 0.5:
        return (rng.choice(hosts),)
    if chance < 0.7:
        return (rng.choice(options.worker_names),)
    if chance < 0.8:
        return tuple(hosts)
    if chance < 0.87:
        return ("coordinator", rng.choice(hosts))
    if chance < 0.93:
        return tuple(rng.sample(everyone, rng.randint(2, min(3, len(everyone)))))
    return everyone
