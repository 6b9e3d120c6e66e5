"""The attendant of a job: it ends every hold, now and then with a changed checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.core.lifecycle import ENDED
from psrpc.checkpoint.shard_file import ShardState
from psrpc.core.errors import CheckpointError, PsError
from psrpc.v1 import coordinator_pb2 as pb
from tests.changed_copy import write_changed_copy
from tests.sim.disk import View
from tests.sim.network import COORDINATOR, POLL_S, RUN_DIR
from tests.sim.operator import AGAIN_S
from tests.sim.schedule import Process, Steps
from tests.sim.witness import ARENA, UNIT

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

MARK = 0.25
"""A change adds it to one half of every shard's pair and takes it from the other."""


class Attendant:
    """One start of its process. The next one, if it dies, knows nothing of its holds."""

    def __init__(self, cluster: Cluster, start: int = 1) -> None:
        self.process = Process(cluster.schedule, "attendant", start)
        self.process.at_death(lambda: Attendant(cluster, start + 1).begin())
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._copies = 0

    def begin(self) -> None:
        """Starts it, in a moment."""
        self._schedule.after(AGAIN_S, None, self.process.spawn, self.live())

    def live(self) -> Steps:
        """Ends hold after hold; it never ends by itself."""
        after = -1
        while True:
            request = pb.AwaitHoldRequest(after=after)
            try:
                hold = yield self._cluster.network.call(COORDINATOR, "AwaitHold", request, POLL_S)
            except PsError as error:
                if not error.retryable:
                    raise
                yield self._schedule.sleep(AGAIN_S)
                continue
            if hold.held:
                yield self._schedule.sleep(self._schedule.random.uniform(0.0, 1.0))
                if (yield from self._end(hold)):
                    after = hold.at
            elif hold.phase in ENDED:
                # It may be started again.
                yield self._schedule.sleep(AGAIN_S)

    def _end(self, hold: pb.AwaitHoldResponse) -> Steps:
        """Returns whether this hold was ended."""
        until, changes = next(one for one in self._cluster.options.holds if one[0] > hold.at)
        name = self._change(hold.checkpoint) if changes else ""
        counts = self._cluster.counts
        while True:
            request = pb.EndHoldRequest(at=hold.at, until=until, restore=name)
            try:
                yield self._cluster.network.call(COORDINATOR, "EndHold", request, POLL_S)
            except CheckpointError as error:
                self._schedule.trace("no changed copy:", error)
                counts["changed copies refused"] += 1
                name = ""
            except PsError as error:
                if not error.retryable:
                    # The coordinator was started again, and holds somewhere else.
                    self._schedule.trace("the hold is another:", error)
                    counts[f"holds not ended by {type(error).__name__}"] += 1
                    return False
                yield self._schedule.sleep(AGAIN_S)
            else:
                counts["holds ended"] += 1
                counts["holds ended with a changed copy"] += bool(name)
                return True

    def _change(self, checkpoint: str) -> str:
        """Writes a changed copy and returns its name; empty if the disk does not let it."""
        self._copies += 1
        suffix = f".set{self.process.incarnation}-{self._copies}"
        changed: dict[int, bytes] = {}

        def change(shard: int, state: ShardState) -> ShardState:
            values = state.values[ARENA].copy()
            pair = values[len(values) - 2 * UNIT :]
            pair[:UNIT] += MARK
            pair[UNIT:] -= MARK
            changed[shard] = values.tobytes()
            return replace(state, values={**state.values, ARENA: values})

        storage = View(self._cluster.disk, self.process)
        try:
            name = write_changed_copy(RUN_DIR / checkpoint, change, storage, suffix)
        except (OSError, CheckpointError) as error:
            self._schedule.trace("no copy is written:", error)
            return ""
        self._cluster.invariants.changed[name] = changed
        return name
