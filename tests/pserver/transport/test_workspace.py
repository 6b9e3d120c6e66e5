"""A worker's memory: where its arrays lie, shared or not."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.transport.attachment import attach
from pserver.transport.segment import HANDSHAKE_BYTES
from pserver.transport.workspace import NDArray, Workspace, segment_nbytes
from psrpc.core.encoding import encode_int8, encode_topk
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan, Role, VariableSpec
from psrpc.core.tables import TableSpec
from tests.pserver.kernel_memory import file_size_limit

few = settings(max_examples=40, derandomize=True)

Wire = Literal["plain", "bfloat16", "float16"]


def arrays(workspace: Workspace) -> list[NDArray]:
    arenas = [a for group in (*workspace.sets, *workspace.outbox) for a in group.values()]
    return arenas + [a for a in (*workspace.row_sets, *workspace.row_outbox) if a.nbytes]


def address(array: NDArray) -> int:
    return int(array.ctypes.data)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    role: st.SearchStrategy[Role] = st.sampled_from(["trainable", "state"])
    kinds = st.tuples(st.integers(0, 3000), st.sampled_from(["float32", "float64"]), role)
    variables = [VariableSpec("first", (3,), "float32", "trainable")]
    for i, (size, dtype, kind) in enumerate(draw(st.lists(kinds, max_size=5))):
        variables.append(VariableSpec(f"v{i}", (size,), dtype, kind))
    placement: Placement = draw(st.sampled_from(["cut", "whole"]))
    return make_plan(variables, draw(st.integers(1, 5)), placement)


@few
@given(plans(), st.sampled_from(get_args(Wire)), st.booleans())
def test_every_array_has_its_aligned_place(plan: Plan, wire: Wire, shared: bool) -> None:
    with closing(Workspace(plan, wire, shared)) as workspace:
        assert (workspace.segment is not None) == shared, workspace.why
        found = sorted(arrays(workspace), key=lambda a: (address(a), a.nbytes))
        for one, following in pairwise(found):
            assert address(one) + one.nbytes <= address(following)
        for array in found:
            assert address(array) % 64 == 0
            assert address(array) % 4096 == 0 or array.nbytes < 4096
            assert array.flags.writeable
            assert not array.any()
        for values in workspace.sets:
            for arena in plan.arenas:
                encoded = arena.name == "float32.trainable" and wire != "plain"
                assert values[arena.name].shape == (arena.length,)
                assert values[arena.name].dtype == (wire if encoded else arena.dtype)
        if workspace.segment:
            assert workspace.segment.bytes.nbytes <= segment_nbytes(plan)
            assert wire != "plain" or workspace.segment.bytes.nbytes == segment_nbytes(plan)
            for array in found:
                offset = workspace.segment.offset_of(array)
                assert offset is not None
                assert offset >= HANDSHAKE_BYTES


@few
@given(plans(), st.integers(1, 100_000), st.booleans())
def test_areas_of_rows_have_their_aligned_place(plan: Plan, nbytes: int, shared: bool) -> None:
    tables = (TableSpec("user", 8, None, {"class_name": "constant"}, {"class_name": "SGD"}),)
    plan = replace(plan, tables=tables)
    with closing(Workspace(plan, shared=shared, rows_nbytes=nbytes)) as workspace:
        found = sorted(arrays(workspace), key=lambda a: (address(a), a.nbytes))
        for one, following in pairwise(found):
            assert address(one) + one.nbytes <= address(following)
        for area in (*workspace.row_sets, *workspace.row_outbox):
            assert address(area) % 64 == 0
            assert not area.any()
        assert all(area.nbytes >= nbytes for area in workspace.row_sets)
        assert len(workspace.row_outbox) == (plan.shards if shared else 0)
        assert all(area.nbytes >= nbytes / plan.shards for area in workspace.row_outbox)
        if workspace.segment:
            assert workspace.segment.bytes.nbytes <= segment_nbytes(plan)


def test_no_area_of_rows_is_larger_than_messages_can_fill() -> None:
    with closing(Workspace(plan_of(), shared=False, rows_nbytes=1 << 50)) as workspace:
        assert not any(area.nbytes for area in workspace.row_sets)


@few
@given(plans())
def test_a_shards_part_fits_in_any_encoding(plan: Plan) -> None:
    with closing(Workspace(plan)) as workspace:
        assert len(workspace.outbox) == plan.shards
        for shard, outbox in enumerate(workspace.outbox):
            for arena in plan.arenas:
                length, box = arena.shard_length(shard), outbox[arena.name]
                assert box.dtype == np.uint8
                assert box.nbytes >= length * arena.itemsize
                if arena.dtype == "float32":
                    gradient = np.ones(length, np.float32)
                    assert box.nbytes >= encode_int8(gradient).nbytes
                    assert box.nbytes >= encode_topk(gradient, length // 2).nbytes


def plan_of(shards: int = 2) -> Plan:
    variables = [
        VariableSpec("kernel", (3000,), "float32", "trainable"),
        VariableSpec("mean", (5,), "float32", "state"),
    ]
    return make_plan(variables, shards, "cut")


def test_values_left_in_the_outbox_are_there_for_the_shard() -> None:
    plan = plan_of()
    with closing(Workspace(plan, "bfloat16")) as workspace:
        segment = workspace.segment
        assert segment
        shards = [attach(segment.offer(k), segment_nbytes(plan)) for k in range(2)]
        for k, shard in enumerate(shards):
            for arena in plan.arenas:
                box = workspace.outbox[k][arena.name]
                box[:] = 11 + k
                offset = segment.offset_of(box)
                assert offset is not None
                assert (shard.view(offset, box.nbytes) == 11 + k).all()
                mine = workspace.sets[1][arena.name][arena.cuts[k] : arena.cuts[k + 1]]
                offset = segment.offset_of(mine)
                assert offset is not None
                shard.view(offset, mine.nbytes, mine.itemsize)[:] = 21 + k
        values = workspace.sets[1]["float32.trainable"]
        cut = plan.arenas[0].cuts[1]
        assert (values[:cut].view(np.uint8) == 21).all()
        assert (values[cut:].view(np.uint8) == 22).all()
        assert values.dtype == ml_dtypes.bfloat16
        assert not workspace.sets[0]["float32.trainable"].any()


def private(workspace: Workspace) -> bool:
    sizes = [{name: a.shape for name, a in values.items()} for values in workspace.sets]
    expected = {"float32.trainable": (3000,), "float32.state": (5,)}
    return workspace.segment is None and workspace.outbox == () and sizes == [expected, expected]


def test_memory_is_private_when_sharing_is_switched_off() -> None:
    workspace = Workspace(plan_of(), shared=False)
    assert private(workspace)
    assert workspace.why == "it is switched off"
    workspace.close()


def test_memory_is_private_when_a_segment_has_no_room_for_all_shards() -> None:
    with closing(Workspace(plan_of(64))) as most:
        assert most.segment
    workspace = Workspace(plan_of(65))
    assert private(workspace)
    assert workspace.why == "there are 65 shards; expected <= 64"


def test_memory_is_private_when_there_is_not_enough_to_share() -> None:
    with file_size_limit(10_000):
        workspace = Workspace(plan_of())
    assert private(workspace)
    assert workspace.why.endswith("could not be made: File too large")


def test_memory_is_private_where_the_system_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    workspace = Workspace(plan_of())
    assert private(workspace)
    assert workspace.why == "linux has no memfd_create"


def test_a_closed_workspace_keeps_arrays_that_are_still_referenced() -> None:
    workspace = Workspace(plan_of())
    values = workspace.sets[0]["float32.trainable"]
    workspace.close()
    workspace.close()
    values[:] = 3
    assert values.sum() == 9000
