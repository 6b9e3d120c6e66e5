"""Decides a worker's next action: the whole protocol, without I/O.

:func:`conduct` is a generator. It yields an action (``worker.protocol.actions``) and receives its
answer, or its error by ``throw``::
    actions = conduct()
    action = next(actions)
    while True:
        try:
            answer = perform(action)
        except (PsError, Stopped) as error:
            action = actions.throw(error)  # raises if the error ends the worker
        else:
            action = actions.send(answer)

:func:`drive` is this loop. The worker process performs actions with ``worker.loop.performer``; a
simulator performs them on the real cores of coordinator and shards, over a simulated network.

Effects of errors:

* ``StaleGeneration``, from any action: the worker drops all that it has computed or leased, and
  registers and joins anew. The performer raises it as soon as a shard refuses a call, or a reply of
  the coordinator shows that the generation is over.
* ``RoundPassed``, from a round's pull or push, or from an evaluation: another worker has done the
  work; this worker leases again.
* ``InvalidJob``: the user's code or data failed; the job fails for all workers. ``TableFull`` has
  the same effect, since no other worker has more room.
* ``Stopped``, ``JobFailed`` and all others: the worker leaves and the error is raised.

Pure: no clock, no threads, no randomness. Leases are protobuf messages, as the coordinator sent
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    InvalidArgument,
    InvalidJob,
    NotReady,
    PsError,
    RoundPassed,
    StaleGeneration,
    TableFull,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from worker.protocol import actions as does
from worker.protocol.actions import Conduct, Leased
from worker.protocol.done import DoneBatch, Stopped, raise_shutdown
from worker.protocol.micro_batches import MicroBatches
from worker.protocol.rounds_ahead import RoundsAheadRunner

ONE_CLOCK = (
    "ssp counts the steps of each worker, and gradients that several devices compute at once would "
    "be older than its bound; start a worker for each device"
)


def conduct(*, sums: bool = False, exact: bool = True) -> Conduct:
    """Yields a worker's actions, from registering to leaving. Always ends by raising an error.

    Args:
        sums: in async mode, push the sum of gradients that several devices compute at once.
        exact: in sync mode, push each gradient by itself; else those of a round that is decided
            ahead as a sum.

    Raises:
        Stopped: the job is done, or the worker was told to leave.
        JobFailed: the job has failed.
        PsError: any other error that was thrown in and that ends a worker.
    """
    stale = ""
    ahead = RoundsAheadRunner(exact=exact)
    try:
        while True:
            try:
                if stale:
                    yield does.Rejoin(stale)
                yield does.Register()
                devices = yield does.Join()
                yield from _work(ahead, devices or 1, sums)
            except StaleGeneration as error:
                stale = str(error) or "the cluster has a newer generation"
    except (InvalidJob, TableFull) as error:
        yield does.Leave(error.coded, fatal=True)
        raise
    except (PsError, Stopped) as error:
        yield does.Leave(str(error))
        raise


def drive(actions: Conduct, perform: Callable[[does.Action], object]) -> None:
    """Performs every action until the generator ends or raises."""
    action = next(actions)
    while True:
        try:
            answer = perform(action)
        except (PsError, Stopped) as error:
            action = actions.throw(error)
        else:
            action = actions.send(answer)


def _work(ahead: RoundsAheadRunner, devices: int, sums: bool) -> Conduct:
    """Works on one lease after the other in the joined generation, until an error ends that.
    Computes on all ``devices`` at once."""
    rounds = MicroBatches(devices)
    lease = yield does.Lease()
    while True:
        match lease.WhichOneof("work"):
            case "train":
                lease = yield from _train(lease.train, devices, sums)
                continue
            case "round":
                lease = yield from rounds.run(lease.round)
                continue
            case "rounds":
                lease = yield from ahead.run(lease.rounds, rounds)
                continue
            case "wait":
                lease = yield does.Lease(after=lease.wait.reason or "work")
                continue
            case "initialize":
                first = lease.initialize
                yield does.ReportWork((yield does.Initialize(first.grant, first.first_rows)))
            case "evaluate":
                try:
                    evaluated = yield does.Evaluate(lease.evaluate)
                except RoundPassed:
                    # Other workers have evaluated it, so the shards have released its snapshot.
                    lease = yield does.Lease(after="work other than an evaluation that is over")
                    continue
                yield does.ReportWork(evaluated)
            case "merge":
                yield does.ReportWork((yield does.Merge(lease.merge)))
            case "finished":
                raise_shutdown(lease.finished)
            case _:
                raise NotReady("the coordinator leased nothing; is it of this version?")
        lease = yield does.Lease()


def _train(task: pb.TrainTask, devices: int, sums: bool) -> Leased:
    """Async, ssp: runs ``task`` and following ones; returns the first lease of another kind.

    Requests the next task when half of the current one is done. Raises InvalidArgument in ssp mode
    with several ``devices``.
    """
    clock = _clock(task)
    if clock is not None and devices > 1:
        raise InvalidArgument(ONE_CLOCK, code="PS506")
    yield does.Pull(batch=_first(task), clock=clock)
    yield does.Expect(tuple(from_batch(each.batch) for each in task.batches))
    while True:
        asked = False
        batches = [*(from_batch(each.batch) for each in task.batches), None]
        for start in range(0, len(task.batches), devices):
            group = task.batches[start : start + devices]
            end = start + len(group)
            if not asked and 2 * (end - 1) >= len(task.batches) - 1:
                asked = True
                yield does.LeaseAhead()
            yield from _apply(group, batches[end], clock, sums)
        if not asked:
            yield does.LeaseAhead()
        lease: pb.Lease = yield does.TakeLease()
        if lease.WhichOneof("work") != "train":
            return lease
        task, before = lease.train, clock
        clock = _clock(task)
        if task.fresh or clock != before:
            # The last push brought parameters, but the lease may have waited for newer ones.
            yield does.Pull(batch=_first(task), clock=clock)


def _apply(
    group: Sequence[types.Attempt],
    following: BatchId | None,
    clock: types.WorkerClock | None,
    sums: bool,
) -> Conduct:
    """Async, ssp: runs the batches of ``group`` at once, from their data to their reports; the last
    push brings new parameters. ``following`` is the next batch of the task."""
    batches = [from_batch(leased.batch) for leased in group]
    # Rows that come during the computation may be older than the next step's clock allows.
    ahead = following if clock is None else None
    answer = yield does.Compute(batches[0], ahead, tuple(batches[1:]))
    results: Sequence[does.Computed] = answer if len(group) > 1 else [answer]
    if sums and len(group) > 1 and all(computed.finite for computed in results):
        yield from _apply_sum(group, results, following)
        return
    for leased, batch, computed in zip(group, batches, results, strict=True):
        last = leased is group[-1]
        pushed: does.Pushed = yield does.PushPull(
            batch,
            leased.attempt,
            not computed.finite,
            following if last else None,
            leased.grant,
            clock,
            pull=last,
        )
        # A shard whose call was repeated may have the batch from this very push.
        unused = tuple(shard for shard in pushed.had if shard not in pushed.asked_again)
        yield does.Settle(unused + pushed.too_stale, None if len(group) == 1 else batch)
        yield _done(leased, computed, pushed)


def _apply_sum(
    group: Sequence[types.Attempt], results: Sequence[does.Computed], following: BatchId | None
) -> Conduct:
    """Async: pushes the sum of the gradients of ``group``. If a shard refuses it, because it had
    some of the batches before, computes and pushes them one by one."""
    first, *others = group
    batch, grant = from_batch(first.batch), first.grant
    answers: Sequence[does.Pushed] = yield does.PushPull(
        batch, first.attempt, following=following, grant=grant, summed=tuple(others)
    )
    if any(pushed.one_by_one for pushed in answers):
        # New parameters have come in place of those that the gradients may be views of.
        yield does.TakeBack()
        for leased in group:
            yield from _apply([leased], following if leased is group[-1] else None, None, False)
        return
    for leased, computed, pushed in zip(group, results, answers, strict=True):
        # There is no compression, and so no residual to restore.
        yield does.Settle(batch=from_batch(leased.batch))
        yield _done(leased, computed, pushed)


def _done(leased: types.Attempt, computed: does.Computed, pushed: does.Pushed) -> does.Done:
    return does.Done(
        DoneBatch(
            from_batch(leased.batch),
            leased.attempt,
            computed.loss,
            pushed.staleness,
            skipped=not computed.finite,
            too_stale=bool(pushed.too_stale),
            receipts=pushed.receipts,
            not_finite=computed.not_finite,
        )
    )


def _clock(task: pb.TrainTask) -> types.WorkerClock | None:
    return task.clock if task.HasField("clock") else None


def _first(task: pb.TrainTask) -> BatchId | None:
    return from_batch(task.batches[0].batch) if task.batches else None
