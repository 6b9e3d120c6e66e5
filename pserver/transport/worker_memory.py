"""The worker's end of a transport through shared memory: tensors in its own segment, short messages
in a mailbox there.

See docs/design/0005-shared-segment.md and docs/design/0012-mailbox.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from pserver.core.assembly import Extent, Seen
from pserver.transport import mailbox
from pserver.transport.grpc_stream import Connector, StandingCall, read_answer
from pserver.transport.mailbox import WorkerBox
from pserver.transport.segment import Segment
from pserver.transport.transport import (
    Arrival,
    NDArray,
    Outgoing,
    Parts,
    Sent,
    TransportChoice,
    WorkerTransport,
)
from pserver.transport.workspace import ShardOutbox, Workspace
from psrpc.core.errors import DeadlinePassed, PsError, SegmentLost, Unreachable
from psrpc.core.plan import Plan
from psrpc.ops.logs import get_logger
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream

log = get_logger()


class _Here(Arrival):
    """Tensors of an answer that the shard has already written to their destination."""

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """See :class:`Arrival`."""


class WorkerMemory(WorkerTransport):
    """The worker's end of a transport through shared memory. Messages and tensors that do not fit
    there go through the call."""

    def __init__(
        self, call: StandingCall, outbox: ShardOutbox, plan: Plan, box: WorkerBox | None
    ) -> None:
        """``box``: the mailbox that the shard watches; None if messages go through the call."""
        self.choice = TransportChoice("shared memory")
        self._call = call
        self._outbox = outbox
        self._plan = plan
        self._box = box
        if box is not None:
            # The shard may end the call instead of answering in the mailbox.
            call.when_over(box.wake)

    def exchange(
        self, header: pb.ExchangeHeader, tensors: Outgoing, sent: Sent
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """See :class:`WorkerTransport`."""
        parts = self._leave(header, tensors)
        header.pull_at.extend(self._places(tensors))
        in_place = bool(header.pull_at)
        short = not parts and (in_place or not header.HasField("pull"))
        answers = self._send(encode_stream(header, parts), short, sent)
        answer, arrival = read_answer(answers, in_place=in_place)
        return answer, _Here() if in_place else arrival

    def _send(self, messages: Iterator[bytes], short: bool, sent: Sent) -> Iterator[bytes]:
        """Sends a request and returns the messages of its answer. A ``short`` exchange has one
        message each way and may go through the mailbox."""
        box = self._box
        if box is not None:
            first = next(messages)
            if short and box.fits(first):
                answer = box.exchange(first, lambda: self._call.over, sent)
                return self._call.answers() if answer is None else iter((answer,))
            messages = chain((first,), messages)
        self._call.send(messages)
        if box is not None:
            box.call_to_stream()
        sent()
        return self._call.answers()

    def failed(self, error: PsError) -> PsError:
        """Returns SegmentLost if the shard did not answer, because only an answer proves that the
        shard no longer uses the segment."""
        if isinstance(error, Unreachable | DeadlinePassed):
            return SegmentLost(f"no answer to an exchange through shared memory: {error}")
        return error

    def _leave(self, header: pb.ExchangeHeader, tensors: Outgoing) -> Parts:
        """Copies the tensors of a push to the segment, or returns them to be sent."""
        if tensors.gradient is None:
            return []
        of_rows: list[int] | None = []
        if pushed := tensors.pushed:
            of_rows = self._outbox.leave_rows(pushed, tensors.rows)
        if of_rows is None:
            return tensors.parts(self._plan)
        header.push_at.extend(self._outbox.leave(tensors.gradient))
        header.push_at.extend(of_rows)
        return []

    def _places(self, tensors: Outgoing) -> list[int]:
        """Returns the offsets of a pull's values in the segment; empty if they are outside it."""
        into, wanted = tensors.into, tensors.wanted
        places: list[int] = []
        if into is not None:
            if into.places is None:
                arrays = (into.mine[arena.name] for arena in self._plan.arenas)
                into.places = self._outbox.offsets(arrays) or []
            if not into.places and self._plan.arenas:
                return []
            places = into.places
        if wanted is None:
            return places
        of_rows = self._outbox.offsets(wanted.into[table] for table, _ in wanted.pairs)
        return [] if of_rows is None else [*places, *of_rows]


class MemoryConnector(Connector):
    """Offers the worker's segment to the shard in each call of one client."""

    def __init__(self, workspace: Workspace | None, peer: str, plan: Plan, shard: int) -> None:
        self.why = ""
        self._segment = None if workspace is None else workspace.segment
        self._outbox: ShardOutbox | None = None
        if workspace is not None and workspace.segment is not None:
            self._outbox = ShardOutbox(workspace, workspace.segment, shard, peer)
        self._peer = peer
        self._plan = plan
        self._shard = shard
        self._logged: str | None = None

    def connect(self, call: StandingCall) -> WorkerMemory | None:
        """See :class:`Connector`."""
        if self._segment is None or self._outbox is None:
            return None
        box = WorkerBox(self._outbox.mailbox) if mailbox.has_futex() else None
        self.why, listens = self._attach(call, self._segment, box)
        if self.why != self._logged:
            self._logged = self.why
            if self.why:
                log.info("tensors go over the network", peer=self._peer, why=self.why)
            else:
                log.info("tensors stay in shared memory", peer=self._peer)
        if self.why:
            return None
        return WorkerMemory(call, self._outbox, self._plan, box if listens else None)

    def _attach(
        self, call: StandingCall, segment: Segment, box: WorkerBox | None
    ) -> tuple[str, bool]:
        """Returns why the shard has not attached the segment (empty if it has), and whether it
        watches ``box``."""
        offer = segment.offer(self._shard)
        wanted = pb.Attach(
            pid=offer.pid, fd=offer.fd, nbytes=offer.nbytes, nonce=offer.nonce, slot=offer.slot
        )
        if box is not None:
            assert self._outbox is not None
            at = segment.offset_of(self._outbox.mailbox)
            assert at is not None
            wanted.mailbox_at, wanted.mailbox_nbytes = at, self._outbox.mailbox.nbytes
            wanted.session = box.session
        attached = call.ask(pb.ExchangeHeader(attach=wanted)).attached
        if attached.refusal:
            return attached.refusal, False
        if not segment.proven(offer.slot, attached.proof):
            return "its proof is not in the segment", False
        return "", attached.listens
