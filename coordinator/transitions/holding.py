"""Holds of an attended job: all batches below a limit are done and saved, and the attendant says
how training continues. See docs/design/0028-fit-on-a-cluster.md.

Deterministic: it asks the disk, which calls back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.checkpoints.choice import Chosen
from coordinator.checkpoints.disk import DiskWork
from coordinator.core.lifecycle import ENDED
from coordinator.core.run import Followed
from coordinator.core.wording import duration
from coordinator.training.job_state import JobState
from coordinator.transitions.stopping import SaveRequest
from psrpc.core.errors import CheckpointError, InvalidArgument, JobFailed, NotReady
from psrpc.ops.logs import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class JobHold:
    """A hold that the attendant may see.

    Attributes:
        at: the batches that all shards have applied. Nothing is in flight.
        epoch: number of finished epochs.
        checkpoint: of exactly this state, relative to the run directory.
        evaluation: the results of the epoch that has just ended; empty within an epoch.
    """

    at: int
    global_step: int
    epoch: int
    checkpoint: str
    evaluation: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HoldEnd:
    """The attendant's answer to the hold ``at`` so many batches: train until ``until`` are done.

    Attributes:
        rate: multiplies the job's own learning rate from now on; None leaves the present factor.
        restore: the name of a changed copy of the hold's checkpoint, which all shards restore
            first; empty for none.
    """

    at: int
    until: int
    rate: float | None = None
    restore: str = ""


class Holding:
    """The holds of one coordinator. Not thread-safe.

    The limit is not stored: when its coordinator has started, a job holds at the batches done, as
    it does before the first one. ``hold`` is the present hold, once it may be reported.
    """

    def __init__(
        self,
        job: JobState,
        disk: DiskWork,
        newest: Callable[[], str],
        switching: Callable[[], bool],
        advance: Callable[[], None],
    ) -> None:
        """``newest`` returns the checkpoint committed last, relative to the run directory;
        ``switching`` says whether the policy is to change for another reason; ``advance`` moves the
        job on as far as its state allows."""
        self._job = job
        self._disk = disk
        self._newest = newest
        self._switching = switching
        self._advance = advance
        self._save = SaveRequest()
        self.hold: JobHold | None = None
        self._begun: JobHold | None = None
        """The hold that has begun and has not ended, whatever generations have begun since."""
        self._checking: HoldEnd | None = None
        self._refused: tuple[HoldEnd, str] | None = None
        self._accepted: HoldEnd | None = None
        """The end of the present hold, which waits for a generation to begin or to end."""
        self._chosen: Chosen | None = None
        """The checkpoint that the accepted end restores, or None."""
        self._last: HoldEnd | None = None
        """The last end that took effect."""
        self._heard_at: float | None = None
        self._knows_the_end = False

    @property
    def attended(self) -> bool:
        """Whether the job has an attendant."""
        return self._job.training.limit is not None

    @property
    def ends(self) -> bool:
        """Whether a job that has trained all batches may end."""
        limit = self._job.training.limit
        return limit is None or limit > self._job.training.span.batches

    @property
    def told(self) -> bool:
        """Whether an attendant that has ever called knows that the job is over."""
        return self._knows_the_end or self._heard_at is None

    @property
    def present(self) -> JobHold:
        """The hold as of now; outside of one, its checkpoint is of an earlier state."""
        training = self._job.training
        ended, span = training.epochs.ended_here, training.span
        return JobHold(
            at=span.batches,
            global_step=span.step,
            epoch=len(training.epochs.history.rows),
            checkpoint=self._newest(),
            evaluation=ended.evaluation if ended is not None else {},
        )

    def begin(self) -> None:
        """Notes that a generation has begun. A job that held, and has lost nothing, still holds,
        with the same checkpoint: the attendant may be changing a copy of that."""
        self._save, self.hold = SaveRequest(), None
        training, begun = self._job.training, self._begun
        if begun is not None and training.held and training.span.batches == begun.at:
            training.orders.saving.stands_at(training.span.step)
            self.hold = begun

    def look(self, after: int) -> JobHold | None:
        """Returns the present hold, or None, to an attendant that has ended the hold at ``after``
        batches (-1: none so far). A coordinator that was started since does not know of that, and
        returns its first hold whatever ``after`` is.

        Raises:
            InvalidArgument: the job is not attended.
        """
        self._check_attended()
        self._heard_at = self._job.now()
        self._knows_the_end = self._job.phase in ENDED
        over = self._job.phase in ("stopping", *ENDED)
        hold = None if over or self._accepted is not None else self.hold
        known = hold is not None and self._last is not None and hold.at <= after
        return None if known else hold

    def end(self, end: HoldEnd) -> bool:
        """Ends the present hold as the attendant says; returns whether that is accepted. False
        while the disk looks at the checkpoint to restore: call it again. Repeatable.

        Raises:
            InvalidArgument: the job does not hold there, or a value is out of range.
            CheckpointError: that checkpoint cannot be restored here; the hold goes on.
            NotReady: the job does not hold now; try again.
            JobFailed: the job is over.
        """
        job = self._job
        self._heard_at = job.now()
        if end in (self._accepted, self._last):
            return True
        if self._refused is not None and self._refused[0] == end:
            why, self._refused = self._refused[1], None
            raise CheckpointError(why)
        if end == self._checking:
            return False
        hold = self._check(end)
        if not end.restore:
            self._accept(end, None)
            return True
        self._checking, self._refused = end, None
        original = hold.checkpoint.rpartition("/")[2]
        self._disk.check_copy(end.restore, original, lambda found: self._checked(end, found))
        return False

    def advance(self) -> None:
        """Advances the hold and its end. Call it at every change and tick while the job trains, or
        finishes."""
        if self.hold is None and self._stands():
            self._begin_hold()
        if self.hold is not None and self._accepted is not None:
            self._go_on(self._accepted)

    def waiting_for(self) -> str:
        """Names the event that a hold, or its end, waits for; empty while the job is not at its
        limit."""
        training = self._job.training
        orders = training.orders
        if self.hold is None:
            saving = orders.snapshots.waiting_for() or orders.awaited_commit()
            return (training.epochs.waiting_for() or saving) if training.held else ""
        if self._accepted is not None:
            return orders.evaluations.waiting_for() or self._job.generations.refused_by_disk
        heard = "it has not called yet"
        if self._heard_at is not None:
            heard = f"it called {duration(self._job.now() - self._heard_at)} ago"
        return f"its attendant (held at batch {self.hold.at}; {heard})"

    def _check_attended(self) -> None:
        if not self.attended:
            raise InvalidArgument("this job does not hold; start it with --attended")

    def _check(self, end: HoldEnd) -> JobHold:
        job, hold = self._job, self.hold
        self._check_attended()
        if job.phase in ENDED:
            raise JobFailed(f"the job is {job.phase} ({job.reason or 'all is trained'})")
        for other in (self._accepted, self._last):
            if other is not None and end.at == other.at:
                raise InvalidArgument(
                    f"the hold at batch {end.at} was ended with {other}; it cannot be ended "
                    f"with {end} any more"
                )
        ends = job.phase == "stopping" or self._accepted is not None or self._checking is not None
        if hold is None or ends:
            raise NotReady(f"the job does not hold at batch {end.at} now; it is {job.phase}")
        if end.at != hold.at:
            raise InvalidArgument(f"the job holds at batch {hold.at}, and not at {end.at}")
        if end.until <= hold.at:
            raise InvalidArgument(f"until is {end.until}; expected more than {hold.at} batches")
        if end.rate is not None and not 0 <= end.rate < math.inf:
            raise InvalidArgument(f"rate is {end.rate:g}; expected a factor of at least 0")
        # A shard that was lost since may have restored the copy already.
        original = hold.checkpoint.rpartition("/")[2]
        if end.restore not in ("", original) and not end.restore.startswith(f"{original}."):
            raise InvalidArgument(
                f"restore is {end.restore!r}; expected the name of a changed copy of the hold's "
                f"checkpoint, which begins with {original + '.'!r}"
            )
        return hold

    def _checked(self, end: HoldEnd, found: Chosen | str) -> None:
        self._checking = None
        if isinstance(found, str):
            self._refused = (end, found)
            self._job.bell.ring()
        else:
            self._accept(end, found)

    def _accept(self, end: HoldEnd, chosen: Chosen | None) -> None:
        self._accepted, self._chosen = end, chosen
        self._advance()

    def _stands(self) -> bool:
        """Whether the job is at its limit, and this state is saved and, at the end of an epoch,
        evaluated."""
        job, training = self._job, self._job.training
        if not self.attended or not job.complete or self.ends:
            return False
        if training.epochs.over:
            return training.orders.saving.final.saved and training.orders.saving.final_evaluated
        held = training.held and self._save.saved(training, job.now())
        return held and training.epochs.awaited is None

    def _begin_hold(self) -> None:
        self.hold = self._begun = hold = self.present
        log.info("held", at=hold.at, step=hold.global_step, checkpoint=hold.checkpoint)

    def _go_on(self, end: HoldEnd) -> None:
        job, training, chosen = self._job, self._job.training, self._chosen
        run, span = job.run, training.span
        followed = None
        if end.rate not in (None, run.followed[-1].rate) and not training.epochs.over:
            assert end.rate is not None
            followed = Followed(run.policy + 1, run.settings, span.step, span.batches, end.rate)
        if followed is not None or chosen is not None:
            # Shards drop snapshots kept for evaluation when they begin again.
            if not training.orders.evaluations.idle or self._switching():
                return
            if not job.generations.go_over(followed, chosen):
                return
        log.info("hold ended", at=end.at, until=end.until, rate=end.rate, restore=end.restore)
        self._last, self._accepted, self._chosen = end, None, None
        self._save, self.hold, self._begun = SaveRequest(), None, None
        training.allow(end.until)
