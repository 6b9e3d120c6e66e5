"""Commits the micro-batches of rounds, and uses the time until the coordinator answers."""

from __future__ import annotations

from collections.abc import Callable

from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.joined import Joined
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol.actions import BeginCommit, Commit, Committed
from worker.step.gradient_source import GradientSource


class Commits:
    """Performs the commits of one worker. One thread uses it."""

    def __init__(
        self,
        source: GradientSource,
        standing: WorkerSession,
        times: StepTimes,
        ended: Callable[[], object],
    ) -> None:
        """``source`` takes the parameters that come during a commit; ``times`` counts the wait.
        Calls ``ended`` at the end of each."""
        self._source = source
        self._ended = ended
        self._standing = standing
        self._times = times

    def commit(self, action: Commit, here: Joined) -> Committed:
        """Performs :class:`worker.protocol.actions.Commit`."""
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        commit = self._standing.committing(action.round, action.batch)
        with self._standing.waits.on(f"the other micro-batches of round {action.round}"):
            if action.pull_next and not here.rows.tables:
                committed = self._commit_and_pull(commit, action.round + 1, here)
            else:
                committed = Committed(commit())
        self._times.took("commit")
        self._ended()
        return committed

    def begin(self, action: BeginCommit, here: Joined) -> None:
        """Performs :class:`worker.protocol.actions.BeginCommit`."""
        here.leases.commit_ahead(self._standing.committing(action.round, action.batch))
        self._ended()

    def take(self, here: Joined) -> pb.Lease:
        """Performs :class:`worker.protocol.actions.TakeCommit`."""
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        try:
            return here.leases.committed()
        finally:
            self._times.took("commit")

    def _commit_and_pull(
        self, commit: Callable[[], pb.Lease], following: int, here: Joined
    ) -> Committed:
        """Commits on another thread and meanwhile waits for the round ``following``: the
        coordinator sends the decision to the shards as it answers the commit."""
        committing = here.leases.run(commit)
        pulled = False
        try:
            pulled = here.shards.pull_soon(following, self._source.spare)
        finally:
            # Wait for the commit even if the pull has failed.
            lease = committing.result()
        if pulled:
            self._source.swap(here.shards.version)
        return Committed(lease, pulled)
