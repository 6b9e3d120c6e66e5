"""What one peer, or all of them together, can cost a server: every bound, with its reason.

What is bounded where it is used: the memory of gradients on their way
(``pserver.transport.buffers``), the rows that a pull or a look-up may ask for
(``pserver.tables.request_check``), chunks and arrays of a stream, refused before anything is
allocated (``pserver.core.assembly``)."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_BYTES = 8 << 20
"""Of one message. Tensors travel in chunks of 2 MiB; nothing needs a larger message."""

WINDOW_BYTES = 512 << 10
"""That a stream holds of what nobody has asked for yet. gRPC would let it grow to several messages
where the network is fast. More than a fast network has on its way; a message that is being read may
come whole, whatever this says."""

MAX_STREAMS = 64
"""Calls under way on one connection. A worker has a handful; a client that begins more waits."""

UNREAD_BYTES = MAX_STREAMS * WINDOW_BYTES
"""Of one connection, at most."""

PEER_CALLS = 256
"""Calls of one address that are served at once, whatever connections they came on; the next is told
to try again before anything of it is read. Half of a shard's threads, and enough for a machine with
a hundred workers. Those of :data:`VITAL` come on top, as many again."""

PEER_BYTES = PEER_CALLS * MAX_MESSAGE_BYTES
"""Of one address, in the messages of calls that are served, at most; a shard keeps only parts of
tensors, in buffers that are counted."""

REQUEST_S = 10.0
"""How long a call that has one request may be about to send it."""

MAX_CONNECTIONS = 4096
"""To one server. Each worker and shard has one or two; an idle one costs some 30 KB."""

HANDSHAKE_S = 20.0
"""Until a connection has done TLS and sent its HTTP/2 settings; then it is closed. Others wait for
nothing meanwhile: a machine under load needs some of it, someone who sends nothing gets no more."""

IDLE_CONNECTION_S = 300.0
"""How long a connection without a call stays open. Clients connect again when they need it."""

NO_DEADLINE_S = 120.0
"""How long a call with tensors may take that came without a deadline."""

LONGEST_CALL_S = 900.0
"""How long it may take whatever its deadline: it keeps a thread, and a push a buffer. Exchanges of
our own clients take 120 s at most, and a conversation twice that."""

PROGRESS_S = 30.0
"""How long the tensors of a push, for which a shard has lent a buffer, may take for each
:data:`PROGRESS_BYTES`, or for what is left of them. A peer that announces a gradient and then sends
nothing would keep the buffer from others for as long as its call lasts."""

PROGRESS_BYTES = 64 << 10
"""Two kilobytes per second, at any pace in between: far less than any link has on which a step ends
within an exchange's deadline. Within a call a message is whole or not here at all, so one of 2 MiB
has :data:`PROGRESS_S`: 70 KB/s."""

WORKER_BUFFERS = 2
"""For gradients of one worker that are on their way to a shard: one, and another for a worker that
comes again before the shard knows that its last connection is gone. Where there are fewer than four
buffers in all, one: never all of them."""

CONVERSATIONS = 448
"""Workers that a shard serves at once: each keeps a thread, which is parked while it computes."""

MORE_THREADS = 64
"""Of a shard, for calls that come and go. Threads are made when they are needed."""

MAX_WAITING = 256
"""Calls that wait for one of a shard's threads; the next is told to try again. Half as many as
there are threads: whoever waits longer than they need has no use for the answer."""

VITAL_THREADS = 16
"""Of a shard, for what has to be answered while all others are taken: :data:`VITAL`."""

VITAL_UNREAD = 8
"""Of them, at most so many wait for requests of one address."""

MAX_PARKED = 2048
"""Calls that a coordinator, which needs no thread for one, serves at once: four of each of
:data:`CONVERSATIONS` workers. Those of :data:`VITAL` come on top."""

MAX_CALLS = 4096
"""Calls of any kind on one server; gRPC itself refuses the next, before it is read."""

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
"""Short calls by which others know that a process lives: a flood of the rest must not look like
its death."""

COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that is gone without a word is found out in 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""For clients and servers."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Our clients send one every 20 s; whoever sends many more is cut off.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
]
