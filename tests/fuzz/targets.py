"""Code that first reads the bytes of a stranger, a damaged disk or a command line. It reads any
bytes or refuses them with an error of ours; a target returns in both cases, and any other exception
is a bug."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from psrpc.checkpoint.manifest import MANIFEST, _sealed, read_manifest
from psrpc.checkpoint.rows_reader import RowsReader
from psrpc.checkpoint.shard_reader import ShardReader
from psrpc.core.encoding import Encoding, check_nbytes, decode, encode_int8, encode_topk
from psrpc.core.errors import InvalidArgument, InvalidJob, PsError
from psrpc.core.plan import Plan, aligned_empty
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import parse_message
from tests.fuzz.coordinator_calls import coordinator_calls, coordinator_seeds
from tests.fuzz.shard_calls import data_port, data_seeds, shard_calls, shard_seeds, ticket
from tests.psrpc.checkpoint.test_corruption import NEW, Memory, pristine
from tests.psrpc.checkpoint.test_forgery import check
from tests.psrpc.forging import checkpoint, documents, forged, places, put
from tests.worker.job.test_job import make_job
from worker.job.overrides import FIELDS, override_job, override_optimizer

Target = Callable[[bytes], None]

LENGTH = 300
"""Elements of the gradient that an encoding is decoded into."""


def codec(data: bytes) -> None:
    """Messages that our codec takes protobuf takes, too, and reads as the same."""
    try:
        found = parse_message(data)
    except InvalidArgument:
        return
    try:
        message = pb.PushGradientsRequest.FromString(data)
    except DecodeError:
        # It looks into the header; ours leaves that to its caller.
        return
    if found.chunk is not None and message.HasField("chunk"):
        assert found.chunk.data == message.chunk.data
        assert found.chunk.offset == message.chunk.offset
        assert found.chunk.arena == message.chunk.arena


def encoding(data: bytes) -> None:
    """As a push arrives: checked, copied to an aligned buffer, decoded into one."""
    for kind in ("int8", "topk"):
        _decode(kind, data)


def _decode(kind: Encoding, data: bytes) -> None:
    if check_nbytes(kind, len(data), LENGTH, "float32"):
        return
    raw = aligned_empty(len(data), "uint8")
    raw[:] = np.frombuffer(data, np.uint8)
    into = aligned_empty(LENGTH, "float32")
    with suppress(PsError):
        decode(kind, raw, into)


def manifest(data: bytes) -> None:
    """A manifest whose checksum is right, whatever it says."""
    for text in (data, _sealed(data.removesuffix(b"\n}"))):
        with suppress(PsError):
            read_manifest(NEW, Memory({NEW / MANIFEST: text}))


def plan(data: bytes) -> None:
    """The plan that a shard gets."""
    with suppress(PsError):
        Plan.from_json(data)


def forgery(data: bytes) -> None:
    """A checkpoint with a replaced value and sizes and checksums made to fit: which
    document, which place, and the value in JSON, or as text."""
    names = sorted(documents())
    name = names[data[0] % len(names)] if data else names[0]
    inside = list(places(documents()[name]))
    where = inside[int.from_bytes(data[1:3], "big") % len(inside)]
    try:
        value = json.loads(data[3:])
    except (ValueError, RecursionError):
        value = data[3:].decode(errors="replace")
    check(checkpoint(name, forged(documents()[name], where, put(value))))


def rows_file(data: bytes) -> None:
    """A part of a shard's rows whose checksum is right."""
    path = Path("/checkpoints/step-1/rows")
    digest = sha256(data).hexdigest()
    with suppress(PsError), RowsReader(path, len(data), digest, Memory({path: data})) as reader:
        reader.check()
        for table in range(len(reader.header.tables)):
            for blocks in (reader.blocks, reader.removed, reader.candidates):
                list(blocks(table))


def shard_file(data: bytes) -> None:
    """A shard's file whose checksum is right."""
    path = Path("/checkpoints/step-1/shard")
    digest = sha256(data).hexdigest()
    with suppress(PsError), ShardReader(path, len(data), digest, Memory({path: data})) as reader:
        for tensor in reader:
            reader.read(tensor)


OPTIMIZER = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.0}}


def overrides(data: bytes) -> None:
    """Texts of several ``--set``, a line each."""
    optimizer = copy.deepcopy(OPTIMIZER)
    with suppress(InvalidJob):
        _, arguments = override_job(_job(), os.fsdecode(data).split("\n"))
        override_optimizer(optimizer, arguments)
    assert optimizer == OPTIMIZER, "it is a copy that is changed"


_job = cache(make_job)

TARGETS: dict[str, Target] = {
    "codec": codec,
    "coordinator_calls": coordinator_calls,
    "data_port": data_port,
    "encoding": encoding,
    "forgery": forgery,
    "manifest": manifest,
    "overrides": overrides,
    "plan": plan,
    "rows_file": rows_file,
    "shard_calls": shard_calls,
    "shard_file": shard_file,
    "ticket": ticket,
}

OF_SERVERS: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "coordinator_calls": coordinator_seeds,
    "data_port": data_seeds,
    "shard_calls": shard_seeds,
    "ticket": lambda: (b"GET / HTTP/1.1", bytes(32)),
}
"""Good input of those that reach a server's own code."""


@cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Good input of a target, to be changed."""
    if target in OF_SERVERS:
        return OF_SERVERS[target]()
    files = {path: data for path, data in pristine().items() if path.parent == NEW}
    text = files[NEW / MANIFEST]
    if target == "manifest":
        return (text,)
    if target == "forgery":
        return tuple(bytes([n, 0, 7 * n]) + b"[-1, {}]" for n in range(len(documents())))
    if target == "plan":
        return (json.dumps(json.loads(text)["plan"]).encode(),)
    if target in ("rows_file", "shard_file"):
        rows = target == "rows_file"
        return tuple(
            data
            for path, data in sorted(files.items())
            if path.name != MANIFEST and ("rows" in path.name) == rows
        )
    if target == "overrides":
        several = b"epochs=3\nmode=ssp\nstaleness=4\noptimizer.learning_rate=0.1"
        return several, *(f"{key}=1".encode() for key in FIELDS)
    if target == "encoding":
        gradient = np.linspace(-1, 1, LENGTH, dtype=np.float32)
        return encode_int8(gradient).tobytes(), encode_topk(gradient, 7).tobytes()
    header = pb.PushHeader(batch=types.BatchId(epoch=1, first=2, count=3), examples=3)
    chunk = types.Chunk(arena=1, offset=8, data=bytes(range(64)))
    return (pb.PushGradientsRequest(header=header, chunk=chunk).SerializeToString(),)
