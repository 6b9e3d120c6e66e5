"""Reads rows of a running job's tables, for serving and for inspection.

    with RowReader("localhost:5000") as reader:
        found = reader.read("user", np.array([17, 4]))  # or strings: ["anna", "ben"]
        found.rows      # float32 [2, width], in the order of the ids
        found.present   # bool [2]: False for the initial value of an untrained row

For a job with TLS, pass certificates from a directory that ``coordinator certs init`` made, or from
``RUN_DIR/certs`` of a run that ``coordinator up`` started:

    security = Security.from_options(Role.READER, Path("my-job"))
    with RowReader("host:5000", security=security) as reader: ...

``Role.READER`` needs ``ca.crt``, ``reader.crt`` and ``reader.key`` there; ``Role.OPERATOR`` needs
``operator.crt`` and ``operator.key`` instead.

A reader does not register and changes nothing, so it may connect and leave at any time. To read the
tables of a job that has ended, restore its checkpoint first; see docs/embeddings.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from coordinator.client.client import CoordinatorClient
from pserver.core.table_ids import look_up_ids
from pserver.wire import messages as wire
from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    InvalidArgument,
    NotConnected,
    NotReady,
    PsError,
    ShardUnreachable,
)
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, TableSpec, hashed, shard_of
from psrpc.net.channel import open_channel
from psrpc.ops.retry import FIRST_S, Announcer, GaveUp, RetryPolicy, retry
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.status import error_from_rpc

CALL_S = 10.0
"""Deadline of one call, unless the reader's timeout is shorter."""

LEAST_CALL_S = 1.0
"""Shortest deadline of a call, even if the timeout is shorter."""

TIMEOUT_S = 30.0
"""How long a reader waits for the shards."""

PAUSE_S = 0.5
"""Longest pause between two tries. A wait may end this much before its timeout."""

ANNOUNCE_S = FIRST_S
"""How long a wait lasts before the reader announces it."""

_LARGEST = 2**63 - 1

Keys = Ids | list[str | bytes]
"""Ids of rows, or strings that map to ids."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows in the order of the requested ids.

    Attributes:
        rows: float32 ``[n, width]``.
        present: bool ``[n]``: whether the job has the row; otherwise ``rows`` contains its initial
            value.
        versions: shard -> version of its rows, for each shard that was read.
    """

    rows: npt.NDArray[np.float32] = field(repr=False)
    present: npt.NDArray[np.bool_] = field(repr=False)
    versions: dict[int, int]


class RowReader:
    """A connection to all shards of a coordinator's job. One thread uses it.

    A read returns the newest rows. Rows of two shards, or of more ids than fit into one message,
    may be of different moments. While the cluster is not ready or a shard does not answer, a call
    repeats for ``timeout_s`` and looks up the shards' addresses again. It fails at once if nothing
    listens at the coordinator's address, unless this reader has reached the coordinator before.
    """

    def __init__(
        self,
        coordinator: str,
        timeout_s: float = TIMEOUT_S,
        security: Security = PLAINTEXT,
        announce: Callable[[str], object] = lambda _line: None,
    ) -> None:
        """``coordinator`` is HOST:PORT. ``security`` has the certificates of a reader or an
        operator, for example ``Security.from_options(Role.READER, DIR)``. ``announce`` gets a line
        now and then with the reason of a wait. The reader connects at the first call."""
        self._coordinator = CoordinatorClient(coordinator, security)
        self._security = security
        self._retry = RetryPolicy(longest_s=PAUSE_S, budget_s=timeout_s)
        self._call_s = min(CALL_S, max(LEAST_CALL_S, timeout_s))
        self._announce = announce
        self._stop = threading.Event()
        self._plan: Plan | None = None
        self._channels: list[grpc.Channel] = []
        self._addresses: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._stop.set()
        self._leave()
        self._coordinator.close()

    def tables(self) -> tuple[TableSpec, ...]:
        """The job's tables.

        Raises:
            CoordinatorUnreachable: the coordinator does not answer.
            NotReady: the cluster is not complete; the message names the missing parts.
        """
        return self._persist(lambda: self._cluster().tables)

    def read(self, table: str, ids: npt.ArrayLike) -> FoundRows:
        """Returns the newest rows of ``ids``, which may repeat. They are integers, or strings that
        ``worker.string_ids`` maps to integers.

        Raises:
            InvalidArgument: no such table (lists the job's tables), strings for a table whose ids
                are numbers, or an id outside its vocabulary or int64.
            CoordinatorUnreachable: the coordinator does not answer.
            NotReady, ShardUnreachable: the cluster, or a shard, did not get ready in time.
        """
        keys = _keys(ids)
        return self._persist(lambda: self._read(table, keys))

    def _read(self, name: str, keys: Keys) -> FoundRows:
        plan = self._cluster()
        spec = next((spec for spec in plan.tables if spec.name == name), None)
        if spec is None:
            names = ", ".join(spec.name for spec in plan.tables) or "none"
            raise InvalidArgument(
                f"there is no table {name!r}; the job's tables are: {names}", code="PS112"
            )
        if isinstance(keys, list) and spec.id_kind == "numbers":
            raise InvalidArgument(
                f"table {name!r} has numbers for ids; {keys[0]!r} is a string: look numbers up "
                "(pserver lookup without --strings)"
            )
        ids = hashed(keys, spec.vocabulary) if isinstance(keys, list) else keys
        once, back = np.unique(ids, return_inverse=True)
        rows = np.empty((len(once), spec.width), np.float32)
        present = np.empty(len(once), np.bool_)
        versions: dict[int, int] = {}
        shards = shard_of(once, plan.row_shards)
        most = look_up_ids(spec.width)
        for shard in range(plan.row_shards):
            at = np.flatnonzero(shards == shard)
            for start in range(0, len(at), most):
                some = at[start : start + most]
                versions[shard], rows[some], present[some] = self._look_up(shard, spec, once[some])
        return FoundRows(rows[back], present[back], versions)

    def _cluster(self) -> Plan:
        if self._plan is None:
            try:
                request = coordinator_pb2.GetClusterRequest()
                cluster = self._coordinator.get_cluster(request, self._call_s)
            except DeadlinePassed as error:
                raise CoordinatorUnreachable(str(error)) from None
            self._plan = Plan.from_json(cluster.plan)
            self._addresses = [shard.address for shard in cluster.shards]
            self._channels = [
                open_channel(address, self._security, Role.SHARD) for address in self._addresses
            ]
        return self._plan

    def _look_up(
        self, shard: int, spec: TableSpec, ids: Ids
    ) -> tuple[int, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Reads rows of one shard; returns their version, values and presence."""
        channel: Any = self._channels[shard]
        call = channel.unary_unary(
            f"/{wire.SERVICE}/LookUp",
            pb.LookUpRequest.SerializeToString,
            pb.LookUpResponse.FromString,
        )
        request = pb.LookUpRequest(table=spec.name, ids=ids.astype("<i8", copy=False).tobytes())
        try:
            answer: pb.LookUpResponse = call(request, timeout=self._call_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, f"shard {shard} at {self._addresses[shard]}") from None
        n, width = len(ids), spec.width
        if len(answer.rows) != 4 * n * width or len(answer.present) != n:
            raise InvalidArgument(
                f"shard {shard} answered {len(answer.rows)} bytes of rows and {len(answer.present)}"
                f" marks; expected {4 * n * width} and {n}"
            )
        rows = np.frombuffer(answer.rows, "<f4").reshape(n, width)
        return answer.version, rows, np.frombuffer(answer.present, np.bool_)

    def _say_waiting(self, reason: str, waited_s: float) -> None:
        self._announce(f"waiting for {reason} ({waited_s:.0f} of {self._retry.budget_s:g} s)")

    def _leave(self) -> None:
        """Closes the channels and forgets the plan, so that the next try gets the cluster again."""
        for channel in self._channels:
            channel.close()
        self._channels = []
        self._plan = None

    def _persist(self, call: Callable[[], Result]) -> Result:
        hopeless: PsError | None = None
        announcer = Announcer(self._say_waiting, ANNOUNCE_S)
        # Counts the wait from now on, since one try may take long.
        announcer.waiting("", time.monotonic())

        def give_up(tries: GaveUp) -> PsError:
            if isinstance(tries.last, CoordinatorUnreachable):
                why = self._coordinator.why_unreachable()
                return CoordinatorUnreachable(
                    f"after {tries.spent_s:.1f} s: {tries.last}" + (f": {why}" if why else ""),
                    code=why.code if why else "",
                )
            if isinstance(tries.last, NotReady):
                return type(tries.last)(f"after {tries.spent_s:.1f} s: waiting for {tries.last}")
            return ShardUnreachable(f"no answer after {tries}")

        def one_try() -> Result:
            nonlocal hopeless
            try:
                return call()
            except PsError as error:
                # Another process may serve the shard by now.
                self._leave()
                if isinstance(error, CoordinatorUnreachable) and not self._coordinator.reached:
                    cause = self._coordinator.raise_if_hopeless()
                    if isinstance(cause, NotConnected):
                        hopeless = CoordinatorUnreachable(
                            f"no coordinator answers: {cause}", code=cause.code
                        )
                        raise hopeless from None
                raise

        return retry(
            one_try,
            self._retry,
            give_up,
            stop=self._stop,
            announce=lambda reason: announcer.waiting(reason, time.monotonic()),
            again=lambda error: error.retryable and error is not hopeless,
        )


def _keys(ids: npt.ArrayLike) -> Keys:
    # Strings stay in a list, because a NumPy array would drop their trailing zero bytes.
    listed: Any = ids.tolist() if isinstance(ids, np.ndarray) and ids.dtype.kind in "OSU" else ids
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        strings = [one for one in listed if isinstance(one, str | bytes)]
        if strings and len(strings) == len(listed):
            return strings
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"the ids to look up are {array.dtype}{list(array.shape)}; expected int64[n], n >= 1, "
            "or a list of strings"
        )
    if array.dtype.kind == "u" and (array > np.uint64(_LARGEST)).any():
        raise InvalidArgument(f"id {array.max()} is to be looked up; expected at most {_LARGEST}")
    return array.astype(np.int64)
