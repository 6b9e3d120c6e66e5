"""Bounds on the cost of one peer, or of all peers together, to a server, each with its reason.

Other modules bound the memory of gradients in transit (``pserver.engine.buffers``), the rows of
a pull or look-up (``pserver.tables.part``), and chunks and arrays of a stream before any
allocation (``pserver.core.assembly``)."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_BYTES = 8 << 20
"""Per message. Tensors travel in chunks of 2 MiB; no message needs more."""

WINDOW_BYTES = 512 << 10
"""Unread bytes per stream: more than a fast network has in transit, where gRPC would allow several
messages. A message that is being read may arrive whole despite this bound."""

MAX_STREAMS = 64
"""Concurrent calls per connection. A worker has a handful; further calls wait in the client. So a
connection has at most ``MAX_STREAMS * WINDOW_BYTES`` unread."""

PEER_CALLS = 256
"""Concurrent calls per address, over all its connections; the server tells the next one to retry
before it reads the request. Half of a shard's threads, enough for a machine with a hundred workers.
:data:`VITAL` calls have a count of their own, as large. So served calls of an address hold at most
``PEER_CALLS * MAX_MESSAGE_BYTES``; shards keep tensors in counted buffers."""

REQUEST_S = 10.0
"""How long a server waits for the request of a call with a single one."""

MAX_CONNECTIONS = 4096
"""Per server. Each worker and shard has one or two; an idle one costs about 30 KB."""

HANDSHAKE_S = 20.0
"""After this the server closes a connection that has not finished TLS and sent its HTTP/2 settings.
A loaded machine needs some of it; a silent client delays no other connection."""

IDLE_CONNECTION_S = 300.0
"""How long a connection without a call stays open. Clients reconnect on demand."""

NO_DEADLINE_S = 120.0
"""Time limit for a call with tensors that arrives without a deadline."""

LONGEST_CALL_S = 900.0
"""Time limit for a call with tensors whatever its deadline: it keeps a thread, and a push a buffer.
Exchanges of our own clients take 120 s at most, and a conversation twice that."""

PROGRESS_S = 30.0
"""Time limit for each :data:`PROGRESS_BYTES`, or the rest, of a push's tensors once the shard has
lent a buffer. Otherwise a peer that announces a gradient and then sends nothing would keep the
buffer from others for the whole call."""

PROGRESS_BYTES = 64 << 10
"""Two kilobytes per second on average: far less than any link needs to finish a step within an
exchange's deadline. gRPC delivers only whole messages, so one of 2 MiB has :data:`PROGRESS_S`:
70 KB/s."""

WORKER_BUFFERS = 2
"""Buffers for one worker's gradients in transit: one, and another for a worker that reconnects
before the shard notices that the old connection is gone. One where there are fewer than four
buffers in all, so a worker never gets all of them."""

CONVERSATIONS = 448
"""Workers per shard: each keeps a thread, which is parked while the worker computes."""

MORE_THREADS = 64
"""Threads of a shard for short calls; made on demand."""

MAX_WAITING = 256
"""Calls that wait for a thread of a shard; the shard tells the next one to try again. Half as many
as threads: after a longer wait the answer is of no use to the caller."""

VITAL_THREADS = 16
"""Threads of a shard for :data:`VITAL` calls, which need answers while all others are busy."""

VITAL_UNREAD = 8
"""Vital threads that may wait for requests of one address."""

MAX_PARKED = 2048
"""Concurrent calls of a coordinator, which needs no thread per call: four for each of
:data:`CONVERSATIONS` workers. :data:`VITAL` calls come on top."""

MAX_CALLS = 4096
"""Calls of any kind per server; gRPC itself refuses the next one unread."""

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
"""Short calls that show that a process is alive; it must not look dead in a flood of others."""

COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Detects a peer that vanished without closing within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Options of clients and servers."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Our clients ping every 20 s; gRPC cuts off a client that pings much more often.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
]
