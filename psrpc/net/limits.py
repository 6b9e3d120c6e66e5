"""Limits on the resources that one peer, or all peers together, may use of a server, with the
reasons.

Other modules bound the memory of gradients in transit (``pserver.engine.buffers``), the rows of a
pull or look-up (``pserver.tables.part``), and chunks and arrays of a stream before any allocation
(``pserver.core.assembly``)."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a message. Tensors travel in chunks of 2 MiB, so no message needs more."""

WINDOW_BYTES = 512 << 10
"""Maximum unread bytes per stream: more than a fast network has in transit. By default gRPC would
allow several messages. A message that is being read may arrive whole despite this limit."""

MAX_STREAMS = 64
"""Maximum concurrent calls per connection; further calls wait in the client. A worker has only a
few. So a connection has at most ``MAX_STREAMS * WINDOW_BYTES`` unread."""

PEER_CALLS = 256
"""Maximum concurrent calls per address, over all its connections. The server refuses further calls
before it reads their requests; clients retry them. This is half of a shard's threads, enough for a
machine with a hundred workers. :data:`VITAL` calls are counted separately, with the same limit. So
the requests of an address take at most ``PEER_CALLS * MAX_MESSAGE_BYTES``; the tensors of pushes
are in separate, counted buffers."""

REQUEST_S = 10.0
"""How long a server waits for the request of a call that has a single one."""

MAX_CONNECTIONS = 4096
"""Maximum connections per server. Each worker and shard has one or two; an idle connection costs
about 30 KB."""

HANDSHAKE_S = 20.0
"""Time after which the server closes a connection that has not finished TLS and sent its HTTP/2
settings. It is long because a loaded machine may be slow; a silent client delays no other
connection."""

IDLE_CONNECTION_S = 300.0
"""How long a connection without a call stays open. Clients reconnect on demand."""

NO_DEADLINE_S = 120.0
"""Time limit for a call with tensors that arrives without a deadline."""

LONGEST_CALL_S = 900.0
"""Time limit for a call with tensors, even if its deadline is later, because the call occupies a
thread, and a push also a buffer. Exchanges of our own clients take at most 120 s, and a
conversation twice that."""

PROGRESS_S = 30.0
"""Time limit for each :data:`PROGRESS_BYTES` of a push's tensors, and for the rest, after the shard
has lent a buffer. Otherwise a peer that announces a gradient and then sends nothing would occupy
the buffer for the whole call."""

PROGRESS_BYTES = 64 << 10
"""Bytes that have to arrive in each :data:`PROGRESS_S`: two kilobytes per second on average, far
slower than any link that can finish a step within an exchange's deadline. But gRPC delivers only
whole messages, so a message of 2 MiB has to arrive within :data:`PROGRESS_S`, at 70 KB/s."""

WORKER_BUFFERS = 2
"""Maximum number of buffers for one worker's arriving gradients: one, plus one in case the worker
reconnects before the shard notices that the old connection is gone. Only one if there are fewer
than four buffers in total, so that a worker never gets all of them."""

CONVERSATIONS = 448
"""Maximum number of workers per shard. Each occupies a thread, which sleeps while the worker
computes."""

MORE_THREADS = 64
"""Number of a shard's threads for short calls; made on demand."""

MAX_WAITING = 256
"""Maximum number of calls that wait for a thread of a shard; the shard refuses further calls, and
clients retry them. It is half the number of threads: after a longer wait the caller could no longer
use the answer."""

VITAL_THREADS = 16
"""Number of a shard's threads for :data:`VITAL` calls, which must be answered even while all other
threads are busy."""

VITAL_UNREAD = 8
"""Maximum number of vital threads that may wait for requests of one address."""

MAX_PARKED = 2048
"""Maximum concurrent calls of a coordinator, not counting :data:`VITAL` calls: four for each of
:data:`CONVERSATIONS` workers. A coordinator needs no thread per call."""

MAX_CALLS = 4096
"""Maximum number of calls of any kind per server; gRPC itself refuses further calls unread."""

VITAL = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/psrpc.v1.ParameterServer/GetStatus",
        "/psrpc.v1.Coordinator/HeartbeatShard",
        "/psrpc.v1.Coordinator/HeartbeatWorker",
        "/psrpc.v1.Coordinator/GetJobStatus",
    }
)
"""Short calls that show that a process is alive. They must succeed even in a flood of other calls,
or the process would look dead."""

COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Detects within 30 s that a peer has vanished without closing the connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Options of clients and servers."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Our clients ping every 20 s. gRPC disconnects a client that pings much more often than this.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
]
