"""A worker's exchanges with one shard: the call they ride on, and where their tensors are."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from pserver import wire
from pserver.assembly import VALUES, Assembly, Extent, check_extents
from pserver.session import Session
from pserver.workspace import Workspace
from psrpc.encoding import Gradient
from psrpc.errors import DeadlinePassed, InvalidArgument, PsError, SegmentLost, Unreachable
from psrpc.logs import get_logger
from psrpc.plan import Plan
from psrpc.status import error_from_rpc
from psrpc.v1 import parameter_server_pb2 as pb

log = get_logger()

NDArray = npt.NDArray[Any]


class Exchanger:
    """Keeps a session open, has the shard attach the worker's segment, and carries exchanges out.

    Thread-safe, one exchange at a time. Nothing is connected before the first.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        peer: str,
        plan: Plan,
        shard: int,
        workspace: Workspace | None,
        deadline_s: float,
    ) -> None:
        """Args: see :class:`pserver.client.ShardClient`."""
        self._channel = channel
        self._peer = peer
        self._plan = plan
        self._shard = shard
        self._workspace = workspace
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._refusal = ""

    @property
    def attached(self) -> bool:
        """Whether the tensors of the last exchange could stay in shared memory."""
        return self._session is not None and self._session.attached

    def close(self) -> None:
        """Ends the session; an exchange that is under way fails."""
        session = self._session
        if session is not None:
            session.close()

    def carry_out(
        self,
        header: pb.ExchangeHeader,
        gradient: Gradient | None,
        into: Mapping[str, NDArray] | None,
    ) -> pb.ExchangeAnswer:
        """One try at one exchange.

        Args:
            header: complete but for the places of the tensors.
            gradient: what the push carries.
            into: the shard's part of every arena, where the values of the pull are put.

        Raises:
            SegmentLost: there is no answer, and the shard may still use the segment.
            PsError: what the shard raised, or why it cannot be reached.
        """
        with self._lock:
            try:
                session = self._standing()
                return self._exchange(session, header, gradient, into)
            except grpc.RpcError as error:
                raise self._lost(error_from_rpc(error, self._peer)) from None
            except Unreachable as error:
                raise self._lost(error) from None
            except BaseException:
                self._end_session()
                raise

    def _exchange(
        self,
        session: Session,
        header: pb.ExchangeHeader,
        gradient: Gradient | None,
        into: Mapping[str, NDArray] | None,
    ) -> pb.ExchangeAnswer:
        del header.push_at[:], header.pull_at[:]
        parts: Sequence[tuple[int, memoryview]] = ()
        if gradient is not None:
            if session.attached:
                header.push_at.extend(self._leave(gradient))
            else:
                parts = wire.gradient_parts(self._plan, gradient)
        if into is not None and session.attached:
            header.pull_at.extend(self._places(into))
        answer, pieces = session.exchange(header, parts)
        try:
            if into is not None:
                extents = wire.from_extents(answer.pull.extents)
                self._check(extents, into)
                if not header.pull_at:
                    Assembly(self._plan, extents, into).accept_all(pieces)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._peer} answered what cannot be used: {error}") from None
        return answer

    def _leave(self, gradient: Gradient) -> list[int]:
        """Leaves a gradient in shared memory; where its arenas lie, in the plan's order."""
        workspace = self._workspace
        assert workspace is not None
        assert workspace.segment is not None
        places = []
        for arena in self._plan.arenas:
            box = workspace.outbox[self._shard][arena.name]
            at = 0
            for part in gradient[arena.name].parts:
                np.copyto(box[at : at + part.nbytes], part.view(np.uint8))
                at += part.nbytes
            place = workspace.segment.offset_of(box)
            assert place is not None
            places.append(place)
        return places

    def _places(self, into: Mapping[str, NDArray]) -> list[int]:
        """Where the values are to be put in shared memory; empty if that is elsewhere."""
        assert self._workspace is not None
        segment = self._workspace.segment
        assert segment is not None
        places = []
        for arena in self._plan.arenas:
            place = segment.offset_of(into[arena.name])
            if place is None:
                return []
            places.append(place)
        return places

    def _check(self, extents: Sequence[Extent], into: Mapping[str, NDArray]) -> None:
        check_extents(self._plan, self._shard, extents, VALUES)
        for extent in extents:
            name = self._plan.arenas[extent.arena].name
            if extent.nbytes != into[name].nbytes:
                raise InvalidArgument(f"arena {name} came as {extent.encoding}")

    # -- the standing call -------------------------------------------------------------------

    def _standing(self) -> Session:
        session = self._session
        if session is not None and not session.aged:
            return session
        self._end_session()
        session = self._session = Session(self._channel, self._peer, self._deadline_s)
        if self._workspace is not None and self._workspace.segment is not None:
            self._attach(session, self._workspace)
        return session

    def _attach(self, session: Session, workspace: Workspace) -> None:
        segment = workspace.segment
        assert segment is not None
        offer = segment.offer(self._shard)
        attach = pb.Attach(
            pid=offer.pid, fd=offer.fd, nbytes=offer.nbytes, nonce=offer.nonce, slot=offer.slot
        )
        answer, _ = session.exchange(pb.ExchangeHeader(attach=attach), ())
        refusal = answer.attached.refusal
        if not refusal and not segment.proven(offer.slot, answer.attached.proof):
            refusal = "its proof is not in the segment"
        session.attached = not refusal
        if refusal and refusal != self._refusal:
            log.info("no shared memory; tensors go over the network", peer=self._peer, why=refusal)
        self._refusal = refusal

    def _lost(self, error: PsError) -> PsError:
        """What it means that an exchange ended with ``error``."""
        attached = self.attached
        self._end_session()
        if attached and isinstance(error, Unreachable | DeadlinePassed):
            # Only an answer says that the shard uses the segment no more.
            return SegmentLost(f"no answer to an exchange through shared memory: {error}")
        return error

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
