"""Delay compensation: the formula, what is kept for it, and what a shard does with both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pserver.core.applied import AppliedSet
from pserver.core.assembly import Extent
from pserver.core.fence import Fence
from pserver.core.requests import InitializeRequest, PullRequest, PushRequest, RestoredState, Values
from pserver.engine.compensation import EPSILON, Compensation
from pserver.engine.engine import ShardEngine
from pserver.engine.pulls import MAX_VERSIONS, Pulled
from pserver.transport.shard_memory import Shared
from pserver.updates.engine import EngineKind
from pserver.updates.factory import make_engine
from psrpc.checkpoint.checkpoint import ManifestFile, commit
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.shard_file import ShardState, write_shard_file
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, Revocation, SnapshotOrder
from psrpc.core.encoding import Encoding, round_to
from psrpc.core.placement import make_plan
from psrpc.core.plan import MEAN_SQUARE, Plan, VariableSpec, aligned_empty
from psrpc.core.policy import Policy
from tests.pserver.shards import INCARNATION, SGD, NDArray, Sink, identity_of
from tests.psrpc.builders import manifest_of

CONSTANT = Policy(delay_compensation="constant", dc_lambda=0.5)
ADAPTIVE = Policy(delay_compensation="adaptive", dc_lambda=0.5, dc_decay=0.75)
SIZE = 70_000
"""More than two blocks."""


def plan_of(dtype: str = "float32", shards: int = 1, size: int = 6) -> Plan:
    return make_plan(
        [
            VariableSpec("kernel", (size,), dtype, "trainable"),
            VariableSpec("mean", (3,), "float32", "state"),
        ],
        shards,
        "cut",
    )


PLAN = plan_of()
NAME = PLAN.arenas[0].name
STATE = PLAN.arenas[1].name


def aligned(array: NDArray) -> NDArray:
    raw = aligned_empty(array.nbytes, "uint8").view(array.dtype)
    raw[:] = array
    return raw


def drawn(seed: int, size: int = SIZE, dtype: str = "float32") -> NDArray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def values_of(plan: Plan, array: NDArray, version: int = 0) -> Values:
    return Values(version, 1, {trainable(plan): array})


def trainable(plan: Plan) -> str:
    (name,) = (arena.name for arena in plan.arenas if arena.role == "trainable")
    return name


# -- the formula -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_constant_correction(dtype: str) -> None:
    plan = plan_of(dtype, size=SIZE)
    name = trainable(plan)
    g, now, pulled = (drawn(seed, dtype=dtype) for seed in (1, 2, 3))
    delta = np.ones(3, np.float32)
    given = {name: g.copy(), STATE: delta}
    found = Compensation(plan, 0, CONSTANT).correct(
        given, values_of(plan, now), values_of(plan, pulled)
    )
    expected = g + np.dtype(dtype).type(0.5) * (g * g * (now - pulled))
    assert found[name].dtype == dtype
    np.testing.assert_allclose(found[name], expected, rtol=1e-6 if dtype == "float32" else 1e-15)
    assert found[STATE] is delta
    assert given[name].tobytes() == g.tobytes(), "it may be a worker's memory"


def test_the_adaptive_correction_remembers_every_gradient() -> None:
    plan = plan_of(size=SIZE)
    compensation = Compensation(plan, 0, ADAPTIVE)
    now, pulled = drawn(1), drawn(2)
    square = np.zeros(SIZE)
    for step in range(3):
        g = drawn(10 + step)
        square = 0.75 * square + 0.25 * g.astype(float) ** 2
        if step == 1:
            # A fresh one is not corrected.
            assert compensation.correct({NAME: g}, None, None) == {NAME: g}
            continue
        found = compensation.correct({NAME: g}, values_of(plan, now), values_of(plan, pulled))
        strength = 0.5 / np.sqrt(square + EPSILON)
        expected = g + strength * g.astype(float) ** 2 * (now - pulled)
        np.testing.assert_allclose(found[NAME], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(compensation.slots()[MEAN_SQUARE][NAME], square, rtol=1e-5)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_rounded_gradients_are_corrected_in_full_precision(encoding: Encoding) -> None:
    plan = plan_of(size=SIZE)
    g, now, pulled = round_to(drawn(1), encoding), drawn(2), drawn(3)
    both = values_of(plan, now), values_of(plan, pulled)
    found = Compensation(plan, 0, CONSTANT).correct({NAME: g}, *both)
    wide = Compensation(plan, 0, CONSTANT).correct({NAME: g.astype("float32")}, *both)
    assert found[NAME].tobytes() == wide[NAME].tobytes()
    assert found[NAME].dtype == np.float32


def test_slots_that_were_given_away_stay_as_they_are() -> None:
    compensation = Compensation(PLAN, 0, ADAPTIVE)
    compensation.correct({NAME: np.ones(6, np.float32)}, None, None)
    kept = compensation.slots()[MEAN_SQUARE][NAME]
    compensation.correct({NAME: np.ones(6, np.float32)}, None, None)
    assert list(kept[:1]) == [0.25]
    assert list(compensation.slots()[MEAN_SQUARE][NAME][:1]) == [0.4375]


# -- what workers have pulled ----------------------------------------------------------------


def test_workers_of_one_version_share_it() -> None:
    pulled = Pulled()
    first, second = values_of(PLAN, drawn(1), 1), values_of(PLAN, drawn(2), 2)
    pulled.remember("a", first)
    pulled.remember("b", first)
    assert len(pulled) == 1
    pulled.remember("a", second)
    assert (pulled.of(1), pulled.of(2)) == (first, second)
    pulled.remember("b", second)
    assert (pulled.of(1), len(pulled)) == (None, 1)
    pulled.forget("a")
    pulled.forget("a")
    assert pulled.of(2) is second
    pulled.forget("b")
    assert len(pulled) == 0


def test_the_oldest_of_too_many_versions_goes() -> None:
    pulled = Pulled()
    for version in range(MAX_VERSIONS + 2):
        pulled.remember(f"w{version}", values_of(PLAN, drawn(1), version))
    assert len(pulled) == MAX_VERSIONS
    assert [pulled.of(v) is None for v in (0, 1, 2)] == [True, True, False]
    pulled.forget("w0")  # as if it had never been
    pulled.remember("w1", values_of(PLAN, drawn(1), 99))
    assert len(pulled) == MAX_VERSIONS


def test_of_too_many_workers_the_first_to_pull_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pserver.engine.pulls.MAX_WORKERS", 2)
    pulled = Pulled()
    for version, worker in enumerate("abac"):
        pulled.remember(worker, values_of(PLAN, drawn(1), version))
    assert [pulled.of(v) is not None for v in range(4)] == [False, False, True, True]


# -- a shard ---------------------------------------------------------------------------------


class Shard:
    """A shard of one engine kind, SGD with learning rate 1, and workers that talk to it."""

    def __init__(self, policy: Policy, kind: EngineKind = "numpy", generation: int = 1) -> None:
        self.sink = Sink()
        self.generation = generation
        self._batches = 0
        identity = replace(identity_of(), settings=policy)
        self.engine = ShardEngine(identity, PLAN, make_engine(kind, SGD, PLAN, 0), self.sink)

    @property
    def fence(self) -> Fence:
        return Fence(self.generation, 1, PLAN.hash, INCARNATION)

    def initialize(self, value: float = 1.0) -> Shard:
        request = InitializeRequest(
            self.fence, tuple(Extent(i, a.length * 4, "plain") for i, a in enumerate(PLAN.arenas))
        )
        self.engine.initialize(request, self._here(value, 0.0), 0)
        return self

    def pull(self, worker: str, encoding: Encoding = "plain") -> int:
        request = PullRequest(self.fence, worker, None, None, encoding)
        return self.engine.pull(request, 0).version

    def push(
        self, worker: str, value: float, base: int, *, fused: bool = True, state: float = 0.0
    ) -> str:
        self._batches += 1
        request = PushRequest(
            self.fence,
            worker,
            Attempt(BatchId(0, self._batches, 1), 1),
            base,
            1,
            False,
            tuple(Extent(i, a.length * 4, "plain") for i, a in enumerate(PLAN.arenas)),
        )
        here = self._here(value, state)
        if fused:
            return self.engine.push_pull(request, here, 0, "plain")[0].outcome
        return self.engine.push(request, here, 0).outcome

    def _here(self, value: float, state: float) -> Shared:
        filled = [aligned(np.full(6, value, np.float32)), aligned(np.full(3, state, np.float32))]
        return Shared([array.view(np.uint8) for array in filled])

    @property
    def value(self) -> float:
        """All elements are alike."""
        request = PullRequest(self.fence, "reader", None)
        (found,) = set(self.engine.pull(request, 0).arrays[NAME])
        self.engine.commands.revoke(Revocation(self.engine.report().revoked + 1, "stranger"))
        self.engine._pushes.forget("reader")
        return float(found)

    @property
    def uncompensated(self) -> int:
        return self.engine.report().counters.uncompensated

    @property
    def held(self) -> int:
        return len(self.engine._pushes._pulled)


KINDS = ["numpy", pytest.param("keras", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ["plain", "bfloat16"])
def test_a_stale_gradient_is_corrected_by_what_its_worker_had_pulled(
    kind: EngineKind, encoding: Encoding
) -> None:
    shard = Shard(CONSTANT, kind).initialize(1.25)
    shard.pull("a", encoding)
    shard.pull("b", encoding)
    assert shard.held == 1
    shard.push("a", 1.0, 0)
    assert shard.value == 0.25, "a fresh one is as it is"
    shard.push("b", 2.0, 0, state=1.0)
    # g = 2 + 0.5 · 4 · (0.25 - 1.25) = 0
    assert shard.value == 0.25
    assert shard.engine.pull(PullRequest(shard.fence, "b", None), 0).arrays[STATE][0] == 1.0
    assert shard.uncompensated == 0


def test_a_push_alone_leaves_what_its_worker_has() -> None:
    shard = Shard(CONSTANT).initialize(1.0)
    shard.pull("a")
    shard.push("a", 1.0, 0, fused=False)
    shard.push("a", 1.0, 0, fused=False)
    # 1 + 0.5 · (0 - 1) = 0.5
    assert (shard.value, shard.uncompensated) == (-0.5, 0)


def test_a_gradient_without_kept_parameters_is_applied_uncorrected_and_counted() -> None:
    shard = Shard(CONSTANT).initialize(1.0)
    shard.pull("a")
    shard.push("a", 1.0, 0)
    shard.push("stranger", 2.0, 0)
    assert (shard.value, shard.uncompensated) == (-2.0, 1)
    shard.push("a", 1.0, 2)
    assert shard.uncompensated == 1, "nothing to correct"


def test_kept_parameters_go_with_their_worker_and_with_the_generation() -> None:
    shard = Shard(CONSTANT).initialize(1.0)
    shard.pull("a")
    shard.pull("b")
    shard.engine.commands.revoke(Revocation(1, "a"))
    assert shard.held == 1
    shard.engine.commands.revoke(Revocation(2, "b"))
    assert shard.held == 0
    shard.pull("c")
    shard.engine.commands.begin(Begin(2, 1, keep=True))
    shard.generation = 2
    assert shard.held == 0
    shard.pull("c")
    shard.engine.commands.begin(Begin(3, 1, keep=True, settings=Policy()))
    shard.generation = 3
    shard.pull("c")
    assert shard.held == 0, "it is of no use"


def test_one_worker_alone_makes_no_update_copy() -> None:
    shard = Shard(CONSTANT).initialize(1.0)
    shard.pull("a")
    place = {shard.engine.pull(PullRequest(shard.fence, "a", None), 0).arrays[NAME].ctypes.data}
    for base in range(3):
        shard.push("a", 1.0, base)
        held = shard.engine.pull(PullRequest(shard.fence, "a", None), 0)
        place.add(held.arrays[NAME].ctypes.data)
        del held
    assert len(place) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_square_is_saved_and_restored(kind: EngineKind) -> None:
    shard = Shard(ADAPTIVE, kind).initialize(1.0)
    shard.pull("a")
    shard.push("a", 2.0, 0)
    shard.engine.commands.take_snapshot(SnapshotOrder("s", 1, True, True))
    taken = shard.sink.snapshots["s"]
    assert list(taken.slots.elements[MEAN_SQUARE][NAME]) == [1.0] * 6
    shard.push("a", 4.0, 1)
    assert list(taken.slots.elements[MEAN_SQUARE][NAME]) == [1.0] * 6

    def restored() -> RestoredState:
        values = {n: aligned(a) for n, a in taken.values.arrays.items()}
        return RestoredState(values, taken.slots, AppliedSet(), 1)

    again = Shard(ADAPTIVE, kind)
    again.engine.commands.begin(Begin(2, 1, restore="c"), restored())
    assert mean_square(again) == [1.0] * 6
    # It goes on with parameters that stay, and is gone with those that do not.
    again.engine.commands.begin(Begin(3, 1, keep=True, settings=replace(ADAPTIVE, dc_lambda=1.0)))
    assert mean_square(again) == [1.0] * 6
    without = replace(taken.slots, elements={})
    again.engine.commands.begin(Begin(4, 1, restore="c"), replace(restored(), slots=without))
    assert mean_square(again) == [0.0] * 6
    # Without compensation it is passed over.
    plain = Shard(Policy(), kind)
    assert plain.engine.commands.begin(Begin(2, 1, restore="c"), restored()) is not None
    assert plain.engine._held.snapshot().slots.elements == {}
    plain.generation = 2
    assert plain.value == -1.0


def test_a_shard_goes_over_from_one_correction_to_the_other() -> None:
    shard = Shard(CONSTANT).initialize(1.0)
    shard.engine.commands.begin(Begin(2, 1, keep=True, settings=ADAPTIVE))
    shard.generation = 2
    shard.pull("a")
    shard.pull("b")
    shard.push("a", 1.0, 0)
    assert mean_square(shard) == [0.25] * 6
    shard.push("b", 2.0, 0)
    assert mean_square(shard) == [1.1875] * 6
    # g = 2 + 0.5 / sqrt(1.1875) · 4 · (0 - 1)
    assert shard.value == pytest.approx(-2.0 + 2.0 / 1.1875**0.5)
    shard.engine.commands.begin(Begin(3, 1, keep=True, settings=CONSTANT))
    assert shard.engine._held.snapshot().slots.elements == {}
    # And what is begun once more begins at 0.
    shard.engine.commands.begin(Begin(4, 1, keep=True, settings=ADAPTIVE))
    assert mean_square(shard) == [0.0] * 6


def mean_square(shard: Shard) -> list[float]:
    return list(shard.engine._held.snapshot().slots.elements[MEAN_SQUARE][NAME])


def test_the_mean_square_goes_into_another_number_of_shards(tmp_path: Path) -> None:
    two, three = plan_of(shards=2, size=600), plan_of(shards=3, size=600)
    whole = np.arange(600, dtype=np.float32)
    files = []
    (tmp_path / "t").mkdir()
    for k in range(2):
        own = slice(*two.arenas[0].cuts[k : k + 2])
        state = ShardState(
            values={a.name: np.zeros(a.shard_length(k), a.dtype) for a in two.arenas},
            elements={MEAN_SQUARE: {NAME: whole[own]}},
            scalars={"iterations": np.array(1)},
        )
        path = tmp_path / "t" / f"shard-{k}-of-2.safetensors"
        written = write_shard_file(path, two, k, state, run_id="r", generation=1, global_step=1)
        files.append(ManifestFile(k, written.name, written.nbytes, written.sha256, 0))
    manifest = manifest_of(two, files, step=1, run="r")
    commit(tmp_path / "t", tmp_path / manifest.name, manifest)
    found = []
    for k in range(3):
        state = load_state(tmp_path / manifest.name, three, k)
        compensation = Compensation(three, k, ADAPTIVE)
        compensation.load_slots(state.elements)
        found.append(compensation.slots()[MEAN_SQUARE][NAME])
    assert np.concatenate(found).tobytes() == whole.tobytes()
