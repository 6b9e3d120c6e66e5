"""A worker's exchanges with one shard: their call, and the places of their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import numpy as np
import numpy.typing as npt

from pserver.client.requests import Target
from pserver.client.row_outbox import RowOutbox
from pserver.client.session import ExchangeSession
from pserver.core.assembly import VALUES, Extent, check_extents
from pserver.core.rows_wanted import RowsWanted
from pserver.core.table_ids import check_row_extents, pairs
from pserver.transport import futex
from pserver.transport.arrival import Arrival
from pserver.transport.data_connection import connect
from pserver.transport.mailbox import WorkerBox
from pserver.transport.workspace import Workspace
from pserver.wire import streams
from pserver.wire.row_messages import pushed_parts
from psrpc.core.encoding import Gradient
from psrpc.core.errors import DeadlinePassed, InvalidArgument, PsError, SegmentLost, Unreachable
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.net.channel import parse_address
from psrpc.ops.logs import get_logger
from psrpc.security.credentials import Security
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.status import error_from_rpc

log = get_logger()

CONNECT_S = 3.0
"""Timeout of opening a data connection; behind a firewall that drops it the call carries all."""

NDArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CarrierChoice:
    """How tensors travel between a worker and a shard; for ``calls``, ``why`` no faster way
    works."""

    kind: Literal["shared memory", "data connection", "calls"]
    why: str = ""


class Exchanger:
    """Keeps a session open, offers the worker's segment to the shard, and carries out exchanges.

    Thread-safe, one exchange at a time. Connects at the first one.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        security: Security,
        peer: str,
        plan: Plan,
        shard: int,
        workspace: Workspace | None,
        deadline_s: float,
        sent: Callable[[], object],
    ) -> None:
        """Args: see :class:`pserver.client.client.ShardClient`."""
        self._sent = sent
        self._channel = channel
        self._address = address
        self._security = security
        self._peer = peer
        self._plan = plan
        self._shard = shard
        self._workspace = workspace
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._session: ExchangeSession | None = None
        self._closed = False
        # Why the segment must not be used any more; empty while it may be.
        self._given_up = ""
        # Why the segment is not attached; empty if it is, None before the first attempt.
        self._refusal: str | None = None
        # Why there is no data connection; empty if there is one, None before the first attempt.
        self._data_refusal: str | None = None
        self._boxes: dict[str, NDArray] = {}
        self._box_places: list[int] = []
        self._row_box: RowOutbox | None = None
        if workspace is not None and workspace.segment is not None:
            self._boxes = workspace.outbox[shard]
            self._box_places = self._places(self._boxes)
            self._row_box = RowOutbox(workspace, shard, peer)

    @property
    def attached(self) -> bool:
        """Whether the tensors of the last exchange stayed in shared memory. Thread-safe."""
        # Read once: the exchanging thread may end the session at any moment.
        session = self._session
        return session is not None and session.attached

    @property
    def transport(self) -> CarrierChoice | None:
        """How tensors travel; None before the first exchange. Thread-safe."""
        refusal = self._data_refusal
        if self.attached:
            return CarrierChoice("shared memory")
        if refusal is None:
            return None
        return CarrierChoice("calls", refusal) if refusal else CarrierChoice("data connection")

    def close(self) -> None:
        """Ends the session; the current exchange and every later one fail."""
        # Before `cancel`: the thread that opens a session looks at the flag afterwards.
        self._closed = True
        self.cancel()

    def cancel(self) -> None:
        """Ends the session; the current exchange fails, the next one opens a new session."""
        session = self._session
        if session is not None:
            session.close()

    def carry_out(
        self,
        header: pb.ExchangeHeader,
        gradient: Gradient | None,
        into: Target | None,
        rows: Mapping[int, Rows] | None = None,
        wanted: RowsWanted | None = None,
    ) -> pb.ExchangeAnswer:
        """Tries one exchange once.

        Args:
            header: complete but for the places of the tensors.
            gradient: of the push.
            into: destination of the pulled values; None if the pull has no arenas.
            rows: row gradients of the push.
            wanted: the rows of the pull.

        Raises:
            SegmentLost: the shard did not answer this or an earlier exchange, and may still use
                the segment.
            PsError: the shard raised it, or it says why the shard is unreachable.
        """
        with self._lock:
            if self._given_up:
                raise SegmentLost(self._given_up)
            session: ExchangeSession | None = None
            try:
                session = self._standing()
                return self._exchange(session, header, gradient, into, rows or {}, wanted)
            except grpc.RpcError as error:
                raise self._lost(error_from_rpc(error, self._peer)) from None
            except Unreachable as error:
                raise self._lost(error if session is None else session.reason(error)) from None
            except PsError:
                # The request was not sent, or the answer is invalid.
                self._end_session()
                raise
            except BaseException as error:
                self._lost(Unreachable(f"interrupted by {type(error).__name__}"))
                raise

    def _exchange(
        self,
        session: ExchangeSession,
        header: pb.ExchangeHeader,
        gradient: Gradient | None,
        into: Target | None,
        rows: Mapping[int, Rows],
        wanted: RowsWanted | None,
    ) -> pb.ExchangeAnswer:
        del header.push_at[:], header.pull_at[:]
        parts: list[tuple[int, memoryview]] = []
        if gradient is not None:
            pushed = pairs({t: r.ids for t, r in rows.items()}) if rows else ()
            places: list[int] | None = []
            if pushed and session.attached:
                assert self._row_box is not None
                places = self._row_box.leave(pushed, rows)
            if session.attached and places is not None:
                header.push_at.extend(self._leave(gradient))
                header.push_at.extend(places)
            else:
                parts = streams.gradient_parts(self._plan, gradient)
                parts.extend(pushed_parts(self._plan, pushed, rows))
        if session.attached and (into is not None or wanted is not None):
            header.pull_at.extend(self._pull_places(into, wanted))
        answer, arrival = session.exchange(header, parts, self._sent)
        try:
            if wanted is not None:
                self._receive(answer, arrival, bool(header.pull_at), into, wanted)
            elif into is not None:
                extents = streams.from_extents(answer.pull.extents)
                self._check(extents, into)
                if not header.pull_at:
                    arrival.receive(self._plan, extents, into.mine)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._peer} answered what cannot be used: {error}") from None
        return answer

    def _pull_places(self, into: Target | None, wanted: RowsWanted | None) -> list[int]:
        """Returns the offsets of a pull's values in shared memory; empty if they are outside it."""
        places: list[int] = []
        if into is not None:
            if into.places is None:
                into.places = self._places(into.mine)
            if not into.places and self._plan.arenas:
                return []
            places = into.places
        if wanted is None:
            return places
        assert self._row_box is not None
        of_rows = self._row_box.places(wanted)
        return [] if of_rows is None else [*places, *of_rows]

    def _receive(
        self,
        answer: pb.ExchangeAnswer,
        arrival: Arrival,
        shared: bool,
        into: Target | None,
        wanted: RowsWanted,
    ) -> None:
        """Receives an answer with rows."""
        extents = streams.from_extents(answer.pull.extents)
        cut = max(0, len(extents) - len(wanted.pairs))
        if into is not None:
            self._check(extents[:cut], into)
        elif cut:
            raise InvalidArgument("arenas came with rows that were asked for alone")
        check_row_extents(self._plan, extents[cut:], wanted.pairs)
        if not shared:
            mine = into.mine if into is not None else {}
            arrival.receive(self._plan, extents, mine, wanted.into)

    def _leave(self, gradient: Gradient) -> list[int]:
        """Copies a gradient to shared memory; returns its arenas' offsets, in the plan's order."""
        for name, box in self._boxes.items():
            at = 0
            for part in gradient[name].parts:
                np.copyto(box[at : at + part.nbytes], part.view(np.uint8))
                at += part.nbytes
        return self._box_places

    def _places(self, arrays: Mapping[str, NDArray]) -> list[int]:
        """Returns offsets of arrays in shared memory, in the plan's order; empty if outside it."""
        assert self._workspace is not None
        segment = self._workspace.segment
        assert segment is not None
        places = [segment.offset_of(arrays[arena.name]) for arena in self._plan.arenas]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else []

    def _check(self, extents: Sequence[Extent], into: Target) -> None:
        if extents == into.extents:
            return
        check_extents(self._plan, self._shard, extents, VALUES)
        for extent in extents:
            name = self._plan.arenas[extent.arena].name
            if extent.nbytes != into.mine[name].nbytes:
                raise InvalidArgument(f"arena {name} came as {extent.encoding}")
        into.extents = extents

    # -- the standing call -------------------------------------------------------------------

    def _standing(self) -> ExchangeSession:
        session = self._session
        if session is not None and session.usable:
            return session
        self._end_session()
        try:
            session = self._session = ExchangeSession(self._channel, self._peer, self._deadline_s)
        except ValueError:
            if not self._closed:
                raise
            # gRPC raises a plain ValueError for a closed channel.
            raise PsError(f"the connection to {self._peer} was closed here") from None
        if self._closed:
            session.close()
        if self._workspace is not None and self._workspace.segment is not None:
            self._attach(session, self._workspace)
        if not session.attached and not self._data_refusal:
            self._open_data(session)
        return session

    def _attach(self, session: ExchangeSession, workspace: Workspace) -> None:
        segment = workspace.segment
        assert segment is not None
        offer = segment.offer(self._shard)
        attach = pb.Attach(
            pid=offer.pid, fd=offer.fd, nbytes=offer.nbytes, nonce=offer.nonce, slot=offer.slot
        )
        box = None
        if futex.available():
            memory = workspace.mailboxes[self._shard]
            box = WorkerBox(memory)
            at = segment.offset_of(memory)
            assert at is not None
            attach.mailbox_at, attach.mailbox_nbytes = at, memory.nbytes
            attach.session = box.session
        answer, _ = session.exchange(pb.ExchangeHeader(attach=attach), ())
        refusal = answer.attached.refusal
        if not refusal and not segment.proven(offer.slot, answer.attached.proof):
            refusal = "its proof is not in the segment"
        session.attached = not refusal
        if box is not None and session.attached and answer.attached.listens:
            session.leave_in(box)
        if refusal != self._refusal:
            if refusal:
                log.info("tensors go over the network", peer=self._peer, why=refusal)
            else:
                log.info("tensors stay in shared memory", peer=self._peer)
        self._refusal = refusal

    def _open_data(self, session: ExchangeSession) -> None:
        """Moves the exchanges of a session to a data connection; after a refusal this client does
        not try again."""
        host, _ = parse_address(self._address)
        answer, _ = session.exchange(pb.ExchangeHeader(open_data=pb.OpenData()), ())
        refusal = answer.data.refusal
        if not refusal:
            try:
                connection = connect(
                    host,
                    answer.data.port,
                    answer.data.secret,
                    self._peer,
                    min(CONNECT_S, self._deadline_s),
                    sealed=self._security.encrypted,
                )
            except Unreachable as error:
                refusal = str(error)
        if refusal:
            self._go_without(refusal)
            return
        try:
            session.exchange(pb.ExchangeHeader(use_data=True), ())
        except BaseException:
            connection.close()
            raise
        session.use_data(connection)
        if self._data_refusal is None:
            self._data_refusal = ""
            log.info("tensors have a connection of their own", peer=self._peer)

    def _go_without(self, why: str) -> None:
        self._data_refusal = why
        log.info("tensors share a connection with calls", peer=self._peer, why=why)

    def _lost(self, error: PsError) -> PsError:
        """Ends the session after ``error`` and returns the error to raise."""
        if self._session is not None and self._session.data_broke:
            self._go_without(str(error))
        attached = self.attached
        self._end_session()
        if attached and isinstance(error, Unreachable | DeadlinePassed):
            # Only an answer proves that the shard no longer uses the segment.
            self._given_up = f"no answer to an exchange through shared memory: {error}"
            return SegmentLost(self._given_up)
        return error

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
