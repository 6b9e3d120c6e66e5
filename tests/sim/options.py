"""The job, cluster and possible faults that a seed implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import get_args

from pserver.tables.admission import CANDIDATES_PER_ROW
from psrpc.checkpoint.checkpoint_every import CheckpointEvery
from psrpc.core.policy import ASYNC, Policy
from psrpc.core.tables import Eviction
from tests.sim.faults import CUT, PLANNED, RATES, SIGNALS
from tests.sim.policies import draw_plan
from tests.sim.table_witness import PLAIN, RECENT, Recent

MOST_BATCHES = 20
"""Updates of one run: with more, the sums of the witness would not be exact in float32."""


@dataclass(frozen=True)
class Options:
    """``policy`` is what the job begins with; with ``then`` it follows that after the first
    ``then_after`` epochs. An operator wants ``changes``, one after the other. A batch has the
    records of ``local_steps`` steps of ``batch_size``. ``batches`` are of one epoch, ``skipped``
    indices into those of the whole job. ``rates`` are
    chances of faults by kind, ``planned`` how many there are of those that come at set moments.
    Things go wrong for ``faults_s``, from when training begins, or with ``early`` from the start.
    ``patience_s`` is how long a worker waits for a shard; with ``shared_memory`` it joins anew
    after a call that had no answer. ``far`` has the processes that messages take long to, and how
    long at most. The job has the first ``tables`` embedding tables of
    ``tests.sim.table_witness``; with ``prefetch`` rows of a batch come while the one before it is
    computed; ``recent`` is what its last table is like. A route between a worker and a shard is cut
    for ``cut_s``, at least and at most.
    The first ``old_workers`` know no clocks of ssp. Workers named in ``devices`` compute so many
    batches at once, and with ``sums`` push the sums of their gradients in async mode. Unless
    ``exact``, they push those of rounds that are decided ahead.
    ``paced`` has each epoch wait for the evaluation of the one before, where there are any.
    With ``hosted`` workers host the shards, and with ``moves`` it is the other way each time that a
    stopped job is resumed. With ``slices`` there are tables, whose rows are on the shards, and
    workers host so many slices beside these.
    With ``holds`` the job is attended: each has the batches after which it holds next, and whether
    the attendant changes the state before."""

    policy: Policy
    then: Policy | None
    then_after: int
    changes: tuple[Policy, ...]
    shards: int
    workers: int
    batches: int
    epochs: int
    batch_size: int
    local_steps: int
    records: int
    checkpoint_every: CheckpointEvery
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
    tables: int = 0
    prefetch: bool = False
    recent: Recent = PLAIN
    cut_s: tuple[float, float] = (2.0, 40.0)
    paced: bool = False
    old_workers: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)
    sums: bool = False
    exact: bool = True
    holds: tuple[tuple[int, bool], ...] = ()
    hosted: bool = False
    moves: bool = False
    slices: int = 0

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies that the job may follow without further commands."""
        return (self.policy, *((self.then,) if self.then else ()), *self.changes)

    @property
    def known(self) -> bool:
        """Whether it is known beforehand which batches make an update together."""
        return len(self.policies) == 1 and not (
            self.policy.backups or self.policy.balance or self.policy.staleness_lr
        )

    @property
    def alike(self) -> bool:
        """Whether all shards always hold the same parameters."""
        return all(policy.rounds and not policy.backups for policy in self.policies)

    @property
    def batch_records(self) -> int:
        """Records of a batch."""
        return self.batch_size * self.local_steps

    @property
    def most_rows(self) -> int:
        """Rows that the table ``recent`` may have, over all shards: as many as one update of any
        policy has, and one more."""
        most = max(policy.open or 1 for policy in self.policies)
        return self.shards * (most * self.batch_records + 1)

    @property
    def total_batches(self) -> int:
        """Of the whole job."""
        return self.batches * self.epochs

    @property
    def total_updates(self) -> int:
        """Global steps of the whole job."""
        return -(-self.batches // self.policy.taken) * self.epochs

    @property
    def expected_s(self) -> float:
        """About how long training takes if all goes well."""
        return 0.5 + self.total_batches * self.batch_s / min(self.workers, self.policy.open or 4)

    def __str__(self) -> str:
        named = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Mapping):
                value = ",".join(f"{k}:{v:.3g}" for k, v in value.items()) or "none"
            elif isinstance(value, Policy):
                value = f"[{value}]"
            elif each.name == "changes":
                value = ",".join(f"[{change}]" for change in value) or "none"
            named.append(
                f"{each.name}={value:.3g}" if isinstance(value, float) else f"{each.name}={value}"
            )
        return " ".join(named)


def draw(random: Random) -> Options:
    """Options as ``random`` has them."""
    mode = random.choice(("async", "sync"))
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
    for kind in PLANNED[: -len((*SIGNALS, CUT))]:
        if not calm and random.random() < 0.3:
            planned[kind] = random.randint(1, 2)
    shards, workers = random.randint(1, 3), random.randint(1, 4)
    far = {}
    if not calm and random.random() < 0.3:
        names = [f"shard-{index}" for index in range(shards)]
        names += [f"worker-{index}" for index in range(workers)]
        far[random.choice((*names, "coordinator"))] = random.choice((0.2, 1.0, 3.0))
    options = Options(
        policy=Policy(mode="sync", replicas=random.randint(1, 4)) if mode == "sync" else ASYNC,
        then=None,
        then_after=0,
        changes=(),
        shards=shards,
        workers=workers,
        batches=batches,
        epochs=epochs,
        batch_size=batch_size,
        local_steps=1,
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
    options = _with_policies(random, options)
    # Last, so that everything else of a seed is as it was before there were tables, intervals in
    # time, signals, ids that come again, cuts, and devices.
    options = _with_interval(random, _with_tables(random, options))
    options = _with_recent(random, _with_signals(random, options))
    options = _with_short_rounds(random, _with_cuts(random, options))
    return _with_devices(random, _with_short_steps(random, options))


def with_attendant(random: Random, options: Options) -> Options:
    """The same, attended: it holds at random batches, and maybe once more at its end."""
    total = options.total_batches
    limits = sorted(random.sample(range(1, total + 1), random.randint(0, min(5, total))))
    # The rows of tables are not changed, and compensation grows with what it is given.
    rigid = options.tables or any(policy.delay_compensation for policy in options.policies)
    holds = ((limit, random.random() < 0.4 and not rigid) for limit in limits)
    return replace(options, holds=(*holds, (total + 1, False)))


def with_slices(random: Random, options: Options) -> Options:
    """The same, but that workers host the shards, in rounds and without what excludes that; maybe
    stopped and resumed the other way, or attended."""
    moves = random.random() < 0.4
    first = options.policy
    if not first.rounds:
        first = Policy(mode="sync", replicas=random.randint(1, 4))
    # Others are refused while the job runs; with shards they would be taken.
    changes = tuple(policy for policy in options.changes if policy.rounds or not moves)
    then = options.then if options.then is not None and options.then.rounds else None
    lacking = options.batches * options.batch_records - options.records
    tables = bool(options.tables)
    # The model is cut into as many pieces as shards have parts of it.
    slices = options.shards if moves or not tables else random.randint(1, 3)
    planned = dict(options.planned)
    if planned and (moves or random.random() < 0.3):
        planned["interrupt"] = random.randint(1, 3)
    if planned and random.random() < 0.5:
        planned["terminate"] = random.randint(1, 3)
    options = replace(
        options,
        policy=first,
        then=then,
        then_after=options.then_after if then else 0,
        changes=changes,
        workers=max(options.workers, slices),
        slices=slices if tables else 0,
        local_steps=1,
        records=options.batches * options.batch_size - lacking,
        far={
            name if tables else name.replace("shard", "worker"): far_s
            for name, far_s in options.far.items()
        },
        prefetch=False,
        old_workers=0,
        planned=planned,
        hosted=True,
        moves=moves,
    )
    # Sums are for async mode.
    options = replace(_with_devices(random, options), sums=False)
    if any(policy.balance for policy in options.policies):
        options = replace(options, skipped=())
    return with_attendant(random, options) if random.random() < 0.1 else options


def with_sums(random: Random, options: Options) -> Options:
    """The same with ``exact=False``: in short rounds, most of which have several micro-batches for
    each worker; maybe with workers that host the shards, or with rounds that begin anew after
    async mode."""
    if random.random() < 0.3:
        options = with_slices(random, options)
    first, again = [Policy(mode="sync", replicas=random.randint(2, 8)) for _ in range(2)]
    changes = random.random() < 0.3 and not options.hosted
    options = replace(
        options,
        policy=first,
        then=None,
        then_after=0,
        changes=(ASYNC, again) if changes else (),
        prefetch=False,
        old_workers=0,
        # Its batches are not those of the job below.
        holds=(),
        exact=False,
    )
    options = _of_one_epoch(options, random.choice((12, 16, MOST_BATCHES)))
    options = replace(
        options,
        batch_s=random.choice((0.002, 0.01, 0.03, 0.1)),
        checkpoint_every=random.choice((3, 6, 50, "0.5s", None)),
    )
    return replace(_with_devices(random, options), sums=False)


def _with_short_steps(random: Random, options: Options) -> Options:
    """The same, maybe with so many and so short steps of ssp that a worker is leased more of them
    at a time than it may run ahead, and with a worker that does not know clocks."""
    if all(policy.mode != "ssp" for policy in options.policies):
        return options
    options = replace(options, old_workers=1 if random.random() < 0.2 else 0)
    if len(options.policies) > 1 or random.random() < 0.3:
        return options
    options = _of_one_epoch(options, random.choice((12, 16, MOST_BATCHES)))
    return replace(options, batch_s=random.choice((0.01, 0.03, 0.1)))


def _with_devices(random: Random, options: Options) -> Options:
    """The same, maybe with workers that have several devices, where nothing excludes them."""
    excluded = options.tables or options.local_steps > 1
    if excluded or any(policy.mode == "ssp" for policy in options.policies):
        return options
    names = [f"worker-{index}" for index in range(options.workers)]
    counts = {name: random.choice((1, 1, 2, 3)) for name in names}
    devices = {name: n for name, n in counts.items() if n > 1}
    return replace(options, devices=devices, sums=bool(devices) and random.random() < 0.6)


def _with_short_rounds(random: Random, options: Options) -> Options:
    """The same, maybe with rounds that are so short, and so many, that some are decided ahead."""
    if not options.policy.rounds or options.then is not None or random.random() < 0.4:
        return options
    options = _of_one_epoch(options, random.choice((12, 16, MOST_BATCHES)))
    return replace(
        options,
        batch_s=random.choice((0.002, 0.01, 0.03)),
        checkpoint_every=random.choice((3, 6, 50, "0.5s", None)),
    )


def _of_one_epoch(options: Options, batches: int) -> Options:
    """The same with one epoch of ``batches``, of which the last lacks as many records as before."""
    lacking = options.batches * options.batch_records - options.records
    return replace(
        options,
        batches=batches,
        epochs=1,
        skipped=tuple(index for index in options.skipped if index < batches),
        records=batches * options.batch_records - lacking,
    )


def _with_signals(random: Random, options: Options) -> Options:
    """The same, maybe with a node that is drained and a job that is stopped."""
    kinds = [kind for kind in SIGNALS if random.random() < 0.2]
    if not options.planned:
        return options
    return replace(options, planned={**options.planned, **dict.fromkeys(kinds, 1)})


def _with_cuts(random: Random, options: Options) -> Options:
    """The same, maybe with routes that are cut where other things go wrong, too."""
    if not (options.rates or options.planned) or random.random() < 0.6:
        return options
    return replace(options, planned={**options.planned, CUT: random.randint(1, 2)})


def _with_interval(random: Random, options: Options) -> Options:
    """The same, maybe with checkpoints by time."""
    # Tables take all the checkpoints that they can get: few of them need several in a row.
    if random.random() < 0.7 or options.tables:
        return options
    return replace(options, checkpoint_every=random.choice(("0.1s", "0.5s", "2s", None)))


def _with_tables(random: Random, options: Options) -> Options:
    """The same, maybe with embedding tables, which do not go with everything."""
    if random.random() < 0.5 or options.local_steps > 1:
        return options
    if any(policy.delay_compensation for policy in options.policies):
        return options
    return replace(options, tables=random.choice((2, 4, 4)), prefetch=random.random() < 0.3)


def _with_recent(random: Random, options: Options) -> Options:
    """The same, maybe with ids that come again in the table that evicts. Where its rows take two
    updates to come into being, there are more such ids than a shard counts, if the job has as many
    records."""
    if options.tables <= RECENT:
        return options
    eviction = random.choice(get_args(Eviction))
    records = options.records * options.epochs
    if records < 2 or random.random() < 0.3:
        return replace(options, recent=Recent(eviction=eviction))
    count = random.choice((1, 2, 2))
    counted = CANDIDATES_PER_ROW * options.most_rows // options.shards
    least = counted + 1 if count > 1 and counted < records else 2
    return replace(options, recent=Recent(random.randint(least, records), count, eviction))


def _with_policies(random: Random, options: Options) -> Options:
    """The same, under other policies than plain ones, maybe several."""
    plan = draw_plan(random, options.policy, options.epochs)
    steps = random.choice((2, 3)) if random.random() < 0.1 else 1
    options = replace(
        options,
        policy=plan.first,
        then=plan.then,
        then_after=plan.then_after,
        changes=plan.changes,
        local_steps=steps,
        records=options.records + options.batches * options.batch_size * (steps - 1),
    )
    if any(policy.balance for policy in options.policies):
        # Where micro-batches are cut is not known beforehand, so neither is which are skipped.
        options = replace(options, skipped=())
    return options
