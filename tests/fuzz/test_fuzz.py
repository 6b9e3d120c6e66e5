"""No input crashes a shard, and none that is refused has changed it.

Hypothesis here, each time the same; coverage-guided and for long: ``python -m tests.fuzz``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pserver.client.client import ShardClient
from pserver.engine.engine import ShardEngine
from pserver.updates.engine import ShardArenas
from pserver.wire import messages as wire
from psrpc.checkpoint.manifest import MANIFEST, Manifest
from psrpc.core.errors import InvalidArgument, PsError, RemoteFailure, Unreachable
from psrpc.core.plan import ALIGNMENT_BYTES, aligned_empty
from psrpc.net.channel import open_channel
from psrpc.v1 import coordinator_pb2 as coordinator_pb
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.status import error_from_rpc
from tests.fuzz import coordinator_calls, shard_calls
from tests.fuzz.calls import split
from tests.fuzz.targets import TARGETS, manifest, overrides, plan, seeds
from tests.pserver.shards import (
    INITIAL,
    counting,
    engine_of,
    fence_of,
    granted,
    plan_of,
    served,
    whole,
)
from tests.psrpc.checkpoint.test_corruption import NEW, pristine
from worker.job.overrides import FIELDS

ROOT = Path(__file__).resolve().parent.parent.parent

quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["set", "del", "dup", "cut"]), st.binary()),
    max_size=4,
)

junk: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["..", "../x", "/etc/x", "a\0b", "x" * 5000, "manifest.json"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def edited(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    for where, kind, more in changes:
        at = where % (len(data) + 1)
        if kind == "set":
            data = data[:at] + more + data[at + len(more) :]
        elif kind == "del":
            data = data[:at] + data[at + len(more) + 1 :]
        elif kind == "dup":
            data = data[:at] + data[max(0, at - len(more) - 1) : at] + data[at:]
        else:
            data = data[:at]
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    @quick
    @given(st.binary(max_size=200) | st.builds(edited, st.sampled_from(seeds(name)), edits))
    def anything(data: bytes) -> None:
        TARGETS[name](data)

    for seed in seeds(name):
        TARGETS[name](seed)
    anything()


@pytest.mark.parametrize("name", ["data_port", "shard_calls"])
def test_a_shard_takes_or_refuses_what_is_nearly_good(name: str) -> None:
    rng = random.Random(name)
    for seed in seeds(name):
        for _ in range(8):
            at, more = rng.randrange(len(seed)), rng.randbytes(rng.randrange(4))
            change = (at, rng.choice(["set", "del", "dup", "cut"]), more)
            TARGETS[name](edited(seed, [change]))


def test_good_calls_of_the_fuzzers_reach_a_shard_and_a_coordinator() -> None:
    """Otherwise they would fuzz nothing but the first check."""
    shard = shard_calls.Shard()
    messages = [message for _, message in split(seeds("shard_calls")[0])]
    pushed = shard.servicer.push_gradients(iter(messages), shard_calls.context())
    assert pushed.result.outcome == pb.PUSH_OUTCOME_APPLIED
    with coordinator_calls.training() as job:
        for seed in seeds("coordinator_calls")[:2]:
            for kind, message in split(seed):
                method = coordinator_calls.METHODS[kind]
                request = getattr(coordinator_pb, method.input_type.name)
                job.call(method.name, request.FromString(message))
        assert job.servicer.status().batches == 1


def replaced(document: Any, steps: list[int], value: Any) -> Any:
    """``document`` with ``value`` at a place that ``steps`` lead to."""
    changed: Any = copy.deepcopy({"all": document})
    here: Any = changed
    key: Any = "all"
    for step in steps:
        inner: Any = here[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        here = inner
        key = sorted(inner)[step % len(inner)] if isinstance(inner, dict) else step % len(inner)
    here[key] = value
    return changed["all"]


places = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@pytest.mark.slow
@settings(quick, max_examples=200)
@given(places, junk)
def test_any_value_anywhere_in_a_manifest(steps: list[int], value: Any) -> None:
    text = pristine()[NEW / MANIFEST]
    document = {k: v for k, v in json.loads(text).items() if k != "sha256"}
    manifest(json.dumps(replaced(document, steps, value), indent=1).encode())


@pytest.mark.slow
@settings(quick, max_examples=200)
@given(places, junk)
def test_any_value_anywhere_in_a_plan(steps: list[int], value: Any) -> None:
    document = json.loads(seeds("plan")[0])
    plan(json.dumps(replaced(document, steps, value)).encode())


def test_an_unchanged_manifest_is_read() -> None:
    assert Manifest.from_json(pristine()[NEW / MANIFEST]).name == NEW.name


@pytest.mark.slow
@settings(quick, max_examples=200)
@given(
    st.sampled_from([*FIELDS, "optimizer.learning_rate", "optimizer.momentum"]) | st.text(),
    st.text() | junk.map(str) | st.sampled_from(["1e999", "nan", "-1", "9" * 400, "[1", "__"]),
)
def test_any_setting_is_applied_or_refused(key: str, text: str) -> None:
    overrides(f"{key}={text}".encode())


# -- a real shard ---------------------------------------------------------------------------------

PLAN = plan_of(size=24)


class Shard:
    """One with values, behind a real server."""

    def __init__(self, engine: ShardEngine, client: ShardClient, channel: grpc.Channel) -> None:
        self.engine = engine
        self.client = client
        self.channel = channel
        header = pb.PushHeader(
            fence=fence_of(client),
            batch=types.BatchId(epoch=0, first=0, count=4),
            examples=4,
            extents=[
                types.Extent(arena=0, nbytes=24 * 4, encoding=types.ENCODING_PLAIN),
                types.Extent(arena=1, nbytes=5 * 4, encoding=types.ENCODING_PLAIN),
            ],
        )
        self.header = granted(header)

    def digest(self) -> str:
        """Of parameters, version and what is known of batches."""
        report = self.engine.report()
        parts = [str(report.version), str(self.engine.applied().to_epochs())]
        values = whole(PLAN)
        self.client.pull(fence_of(self.client), None, values)
        found = hashlib.sha256("\n".join(parts).encode())
        for name in sorted(values):
            found.update(values[name].tobytes())
        return found.hexdigest()

    def send(self, method: str, messages: list[bytes]) -> PsError | None:
        """The error of a call, None if it went well."""
        untyped: Any = self.channel
        try:
            for _ in untyped.stream_stream(f"/{wire.SERVICE}/{method}")(iter(messages), timeout=30):
                pass
        except grpc.RpcError as error:
            return error_from_rpc(error, "the shard")
        return None


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    engine = engine_of(PLAN)
    with served(engine) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        with open_channel(client.peer.rpartition(" ")[2]) as channel:
            yield Shard(engine, client, channel)


def stream(shard: Shard, method: str) -> list[bytes]:
    """A good one, in three messages."""
    header: Any = shard.header
    if method == "Exchange":
        header = pb.ExchangeHeader(push=header)
    message = pb.ExchangeRequest if method == "Exchange" else pb.PushGradientsRequest
    chunks = [
        types.Chunk(arena=0, offset=0, data=np.ones(24, "float32").tobytes()),
        types.Chunk(arena=1, offset=0, data=np.ones(5, "float32").tobytes()),
    ]
    first = message(header=header).SerializeToString()
    return [first, *(message(chunk=chunk).SerializeToString() for chunk in chunks)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["PushGradients", "Exchange", "Initialize"])
def test_any_stream_is_taken_or_refused_and_changes_nothing(shard: Shard, method: str) -> None:
    @quick
    @given(
        st.lists(st.binary(max_size=80), max_size=3)
        | st.tuples(st.integers(0, 2), edits).map(
            lambda change: [
                edited(message, change[1]) if index == change[0] else message
                for index, message in enumerate(stream(shard, method))
            ]
        )
    )
    def anything(messages: list[bytes]) -> None:
        before = shard.digest()
        error = shard.send(method, messages)
        if error is None:
            # Some changes leave a stream good; a batch counts once all the same.
            assert shard.engine.report().version <= len(applied(shard))
            return
        # Both mean that something broke, and not that something was refused.
        assert not isinstance(error, RemoteFailure | Unreachable), error
        assert shard.digest() == before

    anything()


def applied(shard: Shard) -> list[int]:
    """First examples of the batches that count."""
    return [
        start
        for epoch in shard.engine.applied().to_epochs()
        for start, stop in epoch["applied"]
        for start in range(start, stop)
    ]


@pytest.mark.parametrize("offset", range(1, ALIGNMENT_BYTES))
def test_nothing_unaligned_passes_the_engines_door(offset: int) -> None:
    arenas = ShardArenas(PLAN, 0)
    name, other = arenas.owned
    memory = aligned_empty(24 * 4 + ALIGNMENT_BYTES, "uint8")
    arrays = {
        name: memory[offset : offset + 24 * 4].view("float32"),
        other: aligned_empty(5, "float32"),
    }
    with pytest.raises(InvalidArgument, match="not on a 64-byte boundary"):
        arenas.check_aligned(arrays)
    arrays[name] = memory[: 24 * 4].view("float32")
    arenas.check_aligned(arrays)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_the_fuzzer_runs(tmp_path: Path) -> None:
    names = "codec,coordinator_calls,data_port,manifest,overrides,shard_calls,ticket"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", names, "-runs=300", f"-artifact_prefix={tmp_path}/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    # libFuzzer says so at the end of each.
    assert ran.stderr.count("Done 300 runs") == len(names.split(","))
