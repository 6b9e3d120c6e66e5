"""The generations of a run: when to form one, from which state, and whether all shards began it.

Deterministic: orders go out through ``send_to``. The only other side effects are on the store and
the disk. A new generation is stored before it is announced.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.checkpoints.choice import Chosen
from coordinator.checkpoints.disk import DiskChoice, DiskWork
from coordinator.core.run import Followed, Run
from coordinator.membership.formation import Formation
from coordinator.membership.recovery import (
    Origin,
    choose_origin,
    go_over,
    order_in_words,
    restore_all,
    why_restore,
)
from coordinator.records.store import Store
from coordinator.records.stored_values import GENERATION, POLICIES, RESTORED, SINCE
from psrpc.core.commands import Begin, Command
from psrpc.core.errors import CheckpointError
from psrpc.core.shard_reports import HeldReport
from psrpc.ops.logs import get_logger

log = get_logger()


class Generations:
    """Forms generations; ``run`` is the run as of the present one. ``failure`` says why the job
    cannot go on. Not thread-safe."""

    def __init__(
        self,
        run: Run,
        store: Store,
        disk: DiskWork,
        send_to: Callable[[int, Command], None],
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when a slow choice of a checkpoint has been made."""
        self.run = run
        self.formation = Formation(run.plan.shards, run.generation)
        self.failure = ""
        self.warnings: list[str] = []
        self.refused_by_disk = ""
        """Describes the step that the disk refused, which every :meth:`form_if_due` retries; or
        empty."""
        self._store = store
        self._disk = disk
        self._send_to = send_to
        self._changed = changed
        self.formed = False
        """Whether this process has formed a generation."""
        self.again = False
        """Whether another generation is to be formed of the same shards, which lose nothing."""
        self._standings: dict[int, HeldReport] = {}
        self._refused: dict[str, str] = {}
        self._choosing = False
        self._choice: DiskChoice | None = None
        self._restored: Chosen | None = None
        """The checkpoint that the present generation restored because parameters were lost."""
        self._ordered: Chosen | None = None
        """The checkpoint that all shards must restore, until they have, or the job fails."""
        self._went_over: tuple[int, ...] = ()
        """The processes that held the same batches when the policy changed, until the next
        generation is formed."""

    @property
    def standings(self) -> list[HeldReport]:
        """The state of every shard, by index, once the formation is complete."""
        return [self._standings[shard] for shard in range(self.run.plan.shards)]

    @property
    def source(self) -> str:
        """The checkpoint that the present generation restored because parameters were lost,
        relative to the run directory; empty if none was."""
        return self._restored.restored.directory if self._restored else ""

    @property
    def restoring(self) -> str:
        """The checkpoint that shards may be reading now; empty if none."""
        told = (self.formation.told(shard) for shard in range(self.run.plan.shards))
        return next((t.restore.rpartition("/")[2] for t in told if t and t.restore), "")

    def form_if_due(self) -> bool:
        """Forms a generation if one is due and possible; returns whether it did. Call it at every
        change and every tick."""
        self.refused_by_disk = ""
        if not self.formation.due or self._choosing or self.failure:
            return False
        try:
            return self._form()
        except sqlite3.Error as error:
            self.cannot(f"generation {self.run.generation + 1} to be formed", error)
            return False

    def go_over(self, followed: Followed | None, chosen: Chosen | None = None) -> bool:
        """Has the next generation formed of shards that all hold the same batches: under another
        policy if ``followed`` is given, and from checkpoint ``chosen`` of these batches, if given,
        instead of the shards' state. Returns whether that could be stored. To a coordinator that
        restarts before then, the shards' state and earlier decisions are of another history."""
        if followed is not None and not self._follow(followed):
            return False
        if chosen is None:
            self._went_over = tuple(holding.incarnation for holding in self.formation.holdings)
        self._ordered = chosen
        self.formation.dissolve()
        return True

    def _follow(self, followed: Followed) -> bool:
        run = replace(
            self.run, policies=self.run.policies_with(followed), since=self.run.generation + 1
        )
        policies = [one.to_json() for one in run.policies]
        try:
            self._store.put_all({POLICIES: policies, SINCE: run.since})
        except sqlite3.Error as error:
            self.cannot(f"{followed} to be stored", error)
            return False
        self.run = run
        return True

    def begin_again(self, versions: Sequence[int] = ()) -> None:
        """Has another generation formed of the present shards, which have these ``versions``;
        without any, once each has opened another command stream and reported its own."""
        self.again = True
        self.formation.dissolve()
        if versions:
            self.formation.stood(versions)
            return
        for shard in range(self.run.plan.shards):
            self.formation.absent(shard)

    def cannot(self, what: str, error: Exception) -> None:
        """Notes that the disk refuses the step ``what``, which is retried."""
        self.refused_by_disk = f"{what}: {error}"
        self.warnings.append(f"{self.refused_by_disk}; tried again")

    def _form(self) -> bool:
        """Raises sqlite3.Error: nothing has changed."""
        holdings, run = self.formation.holdings, self.run
        generation = 1 + max(run.generation, *(h.generation for h in holdings))
        if self._ordered is not None:
            name, version = self._ordered.restored.directory, self._ordered.version(run.policy)
            begin = Begin(generation, run.policy, False, name, None, run.settings, version)
            origin = restore_all(begin, len(holdings), f"all shards restore {name}")
            return self._raise(generation, origin, self._ordered)
        if all(h.initialized for h in holdings) and self._went_over == tuple(
            h.incarnation for h in holdings
        ):
            step = run.followed[-1].step
            origin = go_over(holdings, run.settings, generation, run.policy, step)
            return self._raise(generation, origin, None)
        decision = None
        if run.settings.rounds:
            decision = self._store.newest_decision(run.since, [h.version for h in holdings])
        noted = self._store.newest_checkpoint() is not None
        choice, self._choice = self._choice, None
        if choice is not None and choice.again:
            self.refused_by_disk = f"the newest good checkpoint to be found: {choice.reason}"
            self.warnings.append(f"{choice.reason}; tried again")
            return False
        chosen = choice.chosen if choice else None
        if why_restore(holdings, run.settings, run.since, decision) and (
            choice is None or (chosen is not None and chosen.restored.name in self._refused)
        ):
            self._choosing = True
            self._disk.choose(dict(self._refused), self._chosen)
            return False
        try:
            origin = choose_origin(
                holdings,
                run.settings,
                generation,
                run.policy,
                since=run.since,
                decision=decision,
                checkpoint=chosen.restored.directory if chosen else None,
                committed=bool(self._refused) or noted or (choice is not None and choice.seen),
                version=chosen.version(run.policy) if chosen else None,
            )
        except CheckpointError as error:
            self.failure = f"{error.coded}: {choice.reason}" if choice else error.coded
            return False
        self.warnings += chosen.remarks if chosen else ()
        formed = self._raise(generation, origin, chosen)
        self._choice = None if formed else choice
        return formed

    def begun(self, shard: int, standing: HeldReport) -> None:
        """Notes that a shard has begun the present generation, and its state."""
        told = self.formation.told(shard)
        if told is None:
            return
        if not standing.holding.initialized and (told.keep or told.restore):
            self.failed(shard, f"it holds no parameters, though told to {order_in_words(told)}")
            return
        self._standings[shard] = standing
        self.formation.begun(shard, standing.holding)
        if self.formation.complete and self.run.settings.rounds:
            self._check_versions()
        self.again = self.again and not self.formation.complete

    def failed(self, shard: int, error: str) -> None:
        """Notes that a shard could not carry out its order: a checkpoint that it cannot restore is
        not used again, parameters that it cannot keep count as lost."""
        told = self.formation.told(shard)
        if told is None:
            return
        what = f"shard {shard} cannot {order_in_words(told)}: {error}"
        self.warnings.append(what)
        if told.restore and self._ordered is not None:
            self.failure = what
        elif told.restore:
            self._refused[told.restore.rpartition("/")[2]] = what
        elif not told.keep:
            self.failure = what
        self.formation.failed(shard)

    def note_restored(self) -> None:
        """Records the checkpoint that this generation began with, now that no shard has refused it:
        the coordinator that committed it may have died before that. Raises sqlite3.Error."""
        if self._restored is not None:
            name, step = self._restored.restored.name, self._restored.restored.global_step
            self._store.put_checkpoint(name, self._restored.generation, step)
        self._ordered = None

    def waiting_for(self) -> str:
        """Names the event that the forming of a generation waits for, besides absent shards."""
        if self.refused_by_disk:
            return self.refused_by_disk
        if self._choosing:
            return "the newest good checkpoint to be found"
        return self.formation.waiting_for()

    def _check_versions(self) -> None:
        versions = {s.holding.version for s in self.standings}
        restored = self.run.restored
        if restored is not None and versions != {restored.global_step}:
            what = f"shards have restored versions {sorted(versions)} from {restored.directory}"
            self._refused[restored.name] = what
            self.failure = what if self._ordered is not None else ""
            self.formation.dissolve()
        elif len(versions) > 1:
            what = f"shards stand at rounds {sorted(versions)} in generation {self.run.generation}"
            # All states count as lost: orders to keep them would repeat this for ever.
            for shard in range(self.run.plan.shards):
                self.formation.failed(shard)
        else:
            return
        self.warnings.append(what)

    def _raise(self, generation: int, origin: Origin, chosen: Chosen | None) -> bool:
        restored = chosen.restored if chosen else None
        everywhere = all(begin.restore for begin in origin.begins)
        run = replace(
            self.run,
            generation=generation,
            since=self.run.since if origin.kept and self.run.since else generation,
            restored=restored if everywhere else None,
        )
        try:
            values: dict[str, object] = {GENERATION: run.generation, SINCE: run.since}
            # Stored even if the job does not keep evicted rows: after a restart it may.
            if chosen is not None and run.plan.tables and not origin.kept:
                kept = [shard for shard, begin in enumerate(origin.begins) if not begin.restore]
                age = [run.generation, chosen.generation, chosen.restored.global_step, kept]
                values[RESTORED] = [*(self._store.get(RESTORED) or ()), age]
            self._store.put_all(values)
        except sqlite3.Error as error:
            self.refused_by_disk = f"generation {generation} to be stored: {error}"
            self.warnings.append(f"generation {generation} cannot be stored: {error}; tried again")
            return False
        log.info("generation formed", generation=generation, why=origin.reason)
        self.run = run
        self.formed, self._went_over = True, ()
        self._restored = chosen
        self._standings.clear()
        begins = [
            replace(begin, rate_scale=run.rate_scale, warmup_updates=run.warmup_updates)
            for begin in origin.begins
        ]
        self.formation.form(generation, begins)
        for shard, begin in enumerate(begins):
            self._send_to(shard, begin)
        return True

    def _chosen(self, choice: DiskChoice) -> None:
        self._choosing = False
        # If a shard is away now, there may be a newer checkpoint once all are back.
        self._choice = choice if self.formation.due else None
        self._changed()
