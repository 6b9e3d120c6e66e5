"""A stock client of another language, @grpc/grpc-js with the .proto files, speaks to a real shard.

``make test-interop`` installs it. What it sends and receives is compared with what the numpy
engine makes of the same numbers here.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pserver.engine.engine import ShardEngine
from pserver.server.server import ShardServer
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.encoding import round_to
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from psrpc.ops.clock import ManualClock
from psrpc.security.signatures import receipt_of
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import to_batch
from tests.pserver.shards import AUTHORITY, MOMENTUM, Sink, identity_of

pytestmark = [pytest.mark.interop, pytest.mark.slow]

FOLDER = Path(__file__).parent
LIMIT_S = 120

# More than a number of JavaScript can hold.
INCARNATION = 2**64 - 3

# The trainable arena of a shard takes three chunks of 2 MiB, the last one not full.
PLAN = make_plan(
    [
        VariableSpec("dense/kernel", (1_500, 1_500), "float32", "trainable"),
        VariableSpec("dense/bias", (1_500,), "float32", "trainable"),
        VariableSpec("norm/mean", (37,), "float32", "state"),
        VariableSpec("exact/kernel", (50,), "float64", "trainable"),
    ],
    2,
    "cut",
)
SHARD = 1

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def arrays_of(formula: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]) -> Arrays:
    """The shard's part of every arena, element i by ``formula``, as scenarios.js has it."""
    found = {}
    for arena in PLAN.arenas:
        indices = np.arange(arena.shard_length(SHARD), dtype=np.float64)
        found[arena.name] = formula(indices).astype(arena.dtype)
    return found


def values() -> Arrays:
    return arrays_of(lambda i: i % 1009 / 3)


def gradients(step: int) -> Arrays:
    return arrays_of(lambda i: (i * 7 + step) % 23 / 3 - 4)


class Expected:
    """The shard's expected parameters: the same update engine, fed here."""

    def __init__(self) -> None:
        self._updates = NumpyEngine(MOMENTUM, PLAN, SHARD)
        self._updates.load(values())

    def after(self, gradients: Mapping[str, Array]) -> Arrays:
        self._updates.apply(gradients)
        return self.now()

    def now(self) -> Arrays:
        return self._updates.snapshot()


def received(answer: Mapping[str, Any]) -> Arrays:
    """The values of a pull, which the client printed."""
    assert list(answer["values"]) == [arena.name for arena in PLAN.arenas]
    return {
        arena.name: np.frombuffer(base64.b64decode(answer["values"][arena.name]), arena.dtype)
        for arena in PLAN.arenas
    }


def assert_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)


def rounded(arrays: Arrays) -> Arrays:
    """Rounds them as a journey in bfloat16 does."""
    name = "float32.trainable"
    return arrays | {name: round_to(arrays[name], "bfloat16").astype(np.float32)}


def engine_of(replicas: int = 0) -> ShardEngine:
    identity = replace(
        identity_of(SHARD, "sync" if replicas else "async", replicas), incarnation=INCARNATION
    )
    updates = NumpyEngine(MOMENTUM, PLAN, SHARD)
    # Its clock stands still, so every update took 0 microseconds and answers can be compared.
    return ShardEngine(identity, PLAN, updates, Sink(), ManualClock())


def lease() -> dict[str, Any]:
    """A coordinator's answers to the client: a session, grants, and the decision of round 0.
    All bytes in base64."""
    batches = [BatchId(0, 4 * step, 4) for step in range(4)]
    attempts = [types.Attempt(batch=to_batch(batch), attempt=1) for batch in batches[:2]]
    decision = types.Decision(generation=1, round=0, attempts=attempts)
    signed = AUTHORITY.sign(decision.SerializeToString())
    return {
        "session": _base64(AUTHORITY.open_session("javascript", "")),
        "initialize": _base64(AUTHORITY.grant_initialize("javascript", 1)),
        "grants": {
            str(batch.first): _base64(AUTHORITY.grant("javascript", 1, Attempt(batch, 1)))
            for batch in batches
        },
        "decided": {
            "decision": _base64(signed.decision),
            "signature": _base64(signed.signature),
        },
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def play(scenario: str, engine: ShardEngine) -> Any:
    """Lets the client play against ``engine`` behind a real server; returns what it printed."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "@grpc" / "grpc-js").is_dir():
        pytest.fail("the client is not installed; say: make test-interop", pytrace=False)
    with ShardServer(SHARD, "127.0.0.1:0") as server:
        server.open(engine)
        identity = engine.identity
        place = {
            "address": f"127.0.0.1:{server.port}",
            "plan": PLAN.to_json().decode(),
            "place": {
                "shard": identity.shard,
                "incarnation": str(identity.incarnation),
                "generation": str(identity.generation),
                "policy": str(identity.policy),
            },
            "lease": lease(),
        }
        done = subprocess.run(
            [node, FOLDER / "scenarios.js", scenario],
            input=json.dumps(place),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def push_result(
    outcome: str, version: int, step: int, staleness: int = 0, *, skipped: bool = False
) -> dict[str, Any]:
    """The message as the client prints it, of the batch of ``step``: numbers of 64 bits as strings,
    bytes as numbers."""
    batch = BatchId(0, 4 * step, 4)
    receipt = receipt_of(AUTHORITY.keys.grant, "javascript", 1, batch, 1, SHARD, skipped)
    return {
        "receipt": {"type": "Buffer", "data": list(receipt)},
        "outcome": f"PUSH_OUTCOME_{outcome}",
        "version": str(version),
        "staleness": str(staleness),
        "applyUs": "0",
        "behind": False,
        "waitedUs": "0",
        "summedReceipts": [],
    }


def test_one_call_for_each_thing() -> None:
    engine = engine_of()
    before, first, again, start, *pushes, end, status = play("calls", engine)
    assert before["incarnation"] == str(INCARNATION)
    assert not before["initialized"]
    assert before["waitingFor"] == "a worker to initialize it"
    assert (first, again) == (
        {"version": "0", "already": False},
        {"version": "0", "already": True},
    )
    expected = Expected()
    assert start["version"] == "0"
    assert_equal(received(start), values())
    assert pushes == [
        push_result("APPLIED", 1, 0),
        push_result("APPLIED", 2, 1, staleness=1),
        push_result("ALREADY_APPLIED", 2, 1),
        push_result("SKIPPED", 2, 2, skipped=True),
    ]
    expected.after(gradients(0))
    assert (end["version"], end["generation"]) == ("2", "1")
    assert_equal(received(end), expected.after(gradients(1)))
    figures = [status[name] for name in ("applied", "alreadyApplied", "skipped", "refused")]
    assert figures == ["2", "1", "1", "0"]
    assert status["stalenessCounts"][:2] == ["1", "1"]
    assert status["nbytes"] == str(PLAN.shard_nbytes(SHARD))


def test_many_exchanges_in_one_call() -> None:
    first, second, pushed, pulled, skipped = play("exchanges", engine_of())
    expected = Expected()
    for step, answer in enumerate((first, second)):
        assert answer["push"] == push_result("APPLIED", step + 1, step)
        assert answer["pull"]["version"] == str(step + 1)
        assert_equal(received(answer), expected.after(gradients(step)))
    assert pushed["push"]["version"] == "3"
    assert (pushed["pull"], pushed["values"]) == (None, {})
    assert pulled["push"] is None
    assert_equal(received(pulled), expected.after(gradients(2)))
    assert skipped["push"]["outcome"] == "PUSH_OUTCOME_SKIPPED"
    assert_equal(received(skipped), expected.now())


def test_gradients_and_values_in_other_encodings() -> None:
    *steps, both, pulled = play("encodings", engine_of())
    expected = Expected()
    name = "float32.trainable"
    indices = np.arange(len(values()[name]))
    blocks = indices // 1024
    int8 = (indices % 255 - 127).astype(np.float32) * (blocks + 0.5).astype(np.float32)
    topk = np.where(indices % 100 == 0, indices + 0.25, 0).astype(np.float32)
    sent = (rounded(gradients(0)), gradients(1) | {name: int8}, gradients(2) | {name: topk})
    for gradient, result, answer in zip(sent, steps[::2], steps[1::2], strict=True):
        assert result["outcome"] == "PUSH_OUTCOME_APPLIED"
        assert_equal(received(answer), expected.after(gradient))
    last = rounded(expected.after(rounded(gradients(3))))
    for answer, header in ((both, both["pull"]), (pulled, pulled)):
        encodings = [extent["encoding"] for extent in header["extents"]]
        assert encodings == ["ENCODING_BFLOAT16", "ENCODING_PLAIN", "ENCODING_PLAIN"]
        assert_equal(received(answer), last)


def test_a_round() -> None:
    *staged, pulled = play("round", engine_of(replicas=2))
    assert [result["outcome"] for result in staged] == ["PUSH_OUTCOME_STAGED"] * 2
    assert pulled["version"] == "1"
    first, second = gradients(0), gradients(1)
    mean = {name: (first[name] + second[name]) / first[name].dtype.type(2) for name in first}
    for name, array in Expected().after(mean).items():
        # The shard weighs before it adds.
        np.testing.assert_allclose(received(pulled)[name], array, rtol=1e-6, atol=1e-5)


REFUSALS = {
    "not initialized": ("UNAVAILABLE", "NotReady"),
    "other generation": ("FAILED_PRECONDITION", "StaleGeneration"),
    "other incarnation": ("FAILED_PRECONDITION", "StaleGeneration"),
    "other plan": ("FAILED_PRECONDITION", "JobMismatch"),
    # gRPC's own, which name no class of ours.
    "message above 8 MiB": ("RESOURCE_EXHAUSTED", None),
    "cancelled in the middle": ("CANCELLED", None),
}
"""Those that are not INVALID_ARGUMENT."""


def test_malformed_requests_are_refused_and_change_nothing() -> None:
    engine = engine_of()
    answers = play("refusals", engine)
    accepted = {name: answers.pop(name) for name in list(answers)[-3:]}
    assert len(answers) == 31
    for name, answer in answers.items():
        expected = REFUSALS.get(name, ("INVALID_ARGUMENT", "InvalidArgument"))
        assert (answer.get("code"), answer.get("psrpcError")) == expected, (name, answer)
        assert answer["details"], name
    assert_equal(received(accepted["values"]["accepted"]), values())
    assert accepted["sound push"]["accepted"]["result"]["outcome"] == "PUSH_OUTCOME_APPLIED"
    expected_values = Expected().after(gradients(0))
    assert_equal(received(accepted["values after it"]["accepted"]), expected_values)
    counters = engine.report().counters
    assert counters.applied == 1
    # Pushes; whether it sees those that gRPC ended is a matter of time.
    assert 24 <= counters.refused <= 26
