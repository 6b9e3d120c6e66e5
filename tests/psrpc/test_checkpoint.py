"""Checkpoints: any number of shards into any other, and nothing torn or changed is loaded."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from psrpc.checkpoint import (
    Manifest,
    ManifestFile,
    ShardState,
    commit,
    load_state,
    load_variables,
    newest_good,
    read_manifest,
    shard_file_name,
    verify,
    write_shard_file,
)
from psrpc.errors import CheckpointError
from psrpc.plan import Placement, Plan, VariableSpec, make_plan
from psrpc.shard_file import ShardFile

VARIABLES = (
    VariableSpec("dense/kernel", (7, 9), "float32", "trainable"),
    VariableSpec("dense/bias", (40,), "float32", "trainable"),
    VariableSpec("scale", (), "float32", "trainable"),
    VariableSpec("exact", (20,), "float64", "trainable"),
    VariableSpec("norm/mean", (21,), "float32", "state"),
)
VALUES = {
    v.name: np.arange(v.size, dtype=v.dtype).reshape(v.shape) + 1000 * i
    for i, v in enumerate(VARIABLES)
}


def plan_of(shards: int, placement: Placement = "cut") -> Plan:
    return make_plan(VARIABLES, shards, placement)


def state_of(plan: Plan, shard: int, version: int = 3, applied: Any = ()) -> ShardState:
    """The shard's part of VALUES; slot ``momentum`` holds their negatives."""
    values = {}
    for arena in plan.arenas:
        whole = np.concatenate([VALUES[plan.variables[i].name].ravel() for i in arena.order])
        values[arena.name] = whole[arena.cuts[shard] : arena.cuts[shard + 1]]
    elements = {a.name: -values[a.name] for a in plan.arenas if a.role == "trainable"}
    return ShardState(
        values=values,
        elements={"momentum": {name: array for name, array in elements.items() if array.size}},
        scalars={"iterations": np.asarray(version, "int64")},
        version=version,
        applied=applied,
    )


def manifest_of(plan: Plan, files: tuple[ManifestFile, ...], step: int = 5) -> Manifest:
    return Manifest(
        run_id="run-1",
        name=f"step-{step:08d}",
        global_step=step,
        generation=1,
        policy=1,
        mode="async",
        replicas=0,
        plan=plan,
        optimizer={"class_name": "SGD", "config": {"learning_rate": 0.1}},
        engine="numpy",
        seed=0,
        batch_size=10,
        data_fingerprint="abc",
        job="job",
        job_sha256="00",
        files=files,
    )


def write(root: Path, plan: Plan, step: int = 5, generation: int = 1, states: Any = None) -> Path:
    """A committed checkpoint."""
    temporary = root / f".tmp-{step}"
    temporary.mkdir(parents=True)
    files = []
    for shard in range(plan.shards):
        path = temporary / shard_file_name(shard, plan.shards)
        state = states[shard] if states else state_of(plan, shard)
        written = write_shard_file(
            path, plan, shard, state, run_id="run-1", generation=generation, global_step=step
        )
        files.append(
            ManifestFile(shard, written.name, written.nbytes, written.sha256, state.version)
        )
    manifest = replace(manifest_of(plan, tuple(files), step), generation=generation)
    commit(temporary, root / manifest.name, manifest)
    return root / manifest.name


def assert_state(found: ShardState, expected: ShardState) -> None:
    assert found.values.keys() == expected.values.keys()
    for name, array in expected.values.items():
        np.testing.assert_array_equal(found.values[name], array)
        assert found.values[name].dtype == array.dtype
        assert not array.size or found.values[name].ctypes.data % 64 == 0
        assert found.values[name].flags.writeable
    for name, array in expected.elements["momentum"].items():
        np.testing.assert_array_equal(found.elements["momentum"][name], array)
    assert found.scalars["iterations"] == expected.scalars["iterations"]
    assert found.scalars["iterations"].dtype == np.int64


@pytest.mark.parametrize("placement", ["cut", "whole"])
@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_shards_loads_into_any_other(
    tmp_path: Path, before: int, after: int, placement: Placement
) -> None:
    directory = write(tmp_path, plan_of(before))
    plan = plan_of(after, placement)
    for shard in range(after):
        assert_state(load_state(directory, plan, shard), state_of(plan, shard))


def test_variables_come_back_whole_and_in_shape(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(3))
    found = load_variables(directory)
    averages = load_variables(directory, prefer_slot="momentum")
    assert found.keys() == VALUES.keys()
    for spec in VARIABLES:
        np.testing.assert_array_equal(found[spec.name], VALUES[spec.name])
        assert found[spec.name].shape == spec.shape
        assert found[spec.name].dtype == np.dtype(spec.dtype)
        sign = -1 if spec.role == "trainable" else 1
        np.testing.assert_array_equal(averages[spec.name], sign * VALUES[spec.name])


def test_slots_of_a_shape_of_their_own_go_with_their_variable(tmp_path: Path) -> None:
    plan = plan_of(2, "whole")
    states = []
    for shard in range(2):
        owned = {s.variable.name for a in plan.arenas for s in plan.shard_slices(a, shard)}
        rows = {"row": {n: np.full((7, 2), 4.0, "float32") for n in owned & {"dense/kernel"}}}
        states.append(replace(state_of(plan, shard), variables=rows))
    directory = write(tmp_path, plan, states=states)
    single = plan_of(1)
    found = load_state(directory, single, 0)
    np.testing.assert_array_equal(found.variables["row"]["dense/kernel"], np.full((7, 2), 4.0))
    holders = [
        "dense/kernel" in load_state(directory, plan, k).variables.get("row", {}) for k in range(2)
    ]
    assert sorted(holders) == [False, True]


def test_the_same_plan_restores_each_shards_own_version_and_applied_set(tmp_path: Path) -> None:
    plan = plan_of(2)
    applied = [
        [{"epoch": 0, "applied": [[0, 40]], "skipped": [[10, 20]]}],
        [
            {"epoch": 0, "applied": [[0, 30], [50, 60]], "skipped": [[10, 20]]},
            {"epoch": 1, "applied": [[0, 10]], "skipped": []},
        ],
    ]
    states = [state_of(plan, k, version=4 + k, applied=applied[k]) for k in range(2)]
    directory = write(tmp_path, plan, states=states)
    for shard in range(2):
        found = load_state(directory, plan, shard)
        assert (found.version, list(found.applied)) == (4 + shard, applied[shard])
    mixed = load_state(directory, plan_of(3), 1)
    assert mixed.version == 5
    assert list(mixed.applied) == [{"epoch": 0, "applied": [[0, 30]], "skipped": [[10, 20]]}]


def test_a_file_is_plain_safetensors(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    found = load_file(directory / "shard-0-of-1.safetensors")
    np.testing.assert_array_equal(found["variable/dense/kernel"], VALUES["dense/kernel"].ravel())
    np.testing.assert_array_equal(found["slot/momentum/scale"], [-VALUES["scale"]])
    assert found["scalar/iterations"] == 3


def test_slices_carry_their_place(tmp_path: Path) -> None:
    plan = plan_of(2)
    directory = write(tmp_path, plan)
    places = []
    for shard in range(2):
        with ShardFile(directory / shard_file_name(shard, 2)) as file:
            entry = file.header.entries.get("variable/dense/kernel")
            if entry:
                places.append((entry["start"], entry["stop"], entry["shape"]))
            assert (file.header.shard, file.header.global_step) == (shard, 5)
    assert places[0][0] == 0
    assert places[-1][1] == 63
    assert {str(shape) for *_, shape in places} == {"[7, 9]"}


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(2))
    manifest = read_manifest(directory)
    assert manifest == manifest_of(plan_of(2), manifest.files)
    assert manifest.plan.hash == plan_of(2).hash
    assert json.loads((directory / "manifest.json").read_text())["format"] == 1
    verify(directory, manifest)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_no_damage_is_loaded_in_silence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = write(tmp_path_factory.mktemp("run"), plan_of(2))
    names = sorted(p.name for p in directory.iterdir())
    path = directory / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["flip", "truncate", "extend", "remove", "swap"])):
        case "flip":
            bit = 1 << data.draw(st.integers(0, 7))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        case "truncate":
            path.write_bytes(whole[:at])
        case "extend":
            path.write_bytes(whole + b"}")
        case "remove":
            path.unlink()
        case "swap":
            first, second = (directory / shard_file_name(k, 2) for k in range(2))
            spare = directory / "spare"
            first.rename(spare)
            second.rename(first)
            spare.rename(second)
    try:
        verify(directory, read_manifest(directory))
    except CheckpointError:
        with pytest.raises(CheckpointError, match=str(directory)):
            load_state(directory, plan_of(1), 0)
    else:
        # A changed manifest may still be true of the files: white space, or its own words.
        assert path.name == "manifest.json"


def test_the_newest_good_checkpoint_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    plan = plan_of(2)
    good = write(tmp_path, plan, step=10)
    torn, changed, empty = (write(tmp_path, plan, step=step) for step in (20, 30, 40))
    older = write(tmp_path, plan, step=5)
    path = torn / "shard-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    path = changed / "shard-0-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    (empty / "manifest.json").unlink()
    (tmp_path / ".tmp-step-00000050").mkdir()
    choice = newest_good(tmp_path)
    assert choice.directory == good
    assert choice.manifest.global_step == 10
    reasons = dict(choice.refused)
    assert reasons.keys() == {torn, changed, empty}
    assert "bytes; expected" in reasons[torn]
    assert "SHA-256" in reasons[changed]
    assert "no manifest.json" in reasons[empty]
    assert older not in reasons


def test_a_later_generation_is_newer_whatever_its_step(tmp_path: Path) -> None:
    plan = plan_of(1)
    write(tmp_path, plan, step=20)
    later = write(tmp_path, plan, step=10, generation=2)
    assert newest_good(tmp_path).directory == later


def test_no_good_checkpoint_is_an_error_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no good checkpoint in {tmp_path}"):
        newest_good(tmp_path)
    directory = write(tmp_path, plan_of(1))
    (directory / "shard-0-of-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-0-of-1.safetensors cannot be read"):
        newest_good(tmp_path)


def test_other_variables_are_refused_by_name(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    wider = (replace(VARIABLES[0], shape=(7, 10)), *VARIABLES[1:])
    with pytest.raises(
        CheckpointError, match=r"'dense/kernel' as .*\[7, 9\]; the job has .*\[7, 10\]"
    ):
        load_state(directory, make_plan(wider, 1, "cut"), 0)
    with pytest.raises(CheckpointError, match=r"'scale' as .*; the job has it as none"):
        load_state(directory, make_plan(VARIABLES[:2] + VARIABLES[3:], 1, "cut"), 0)


def test_files_and_names_are_synced_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that makes a crash at any point harmless, see DESIGN §8."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    root = tmp_path / "checkpoints"
    write(root, plan_of(1))
    assert events == [
        "fsync shard-0-of-1.safetensors",
        "fsync .tmp-5",
        "fsync manifest.json",
        "fsync .tmp-5",
        "rename .tmp-5 step-00000005",
        "fsync checkpoints",
    ]


def test_an_error_of_the_disk_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"shard-0.*Input/output error"):
        write(tmp_path, plan_of(1))
    with pytest.raises(CheckpointError, match="No such file"):
        write_shard_file(
            tmp_path / "gone" / "x",
            plan_of(1),
            0,
            state_of(plan_of(1), 0),
            run_id="r",
            generation=1,
            global_step=0,
        )


def test_a_commit_without_all_its_files_is_refused(tmp_path: Path) -> None:
    temporary = tmp_path / ".tmp-step"
    temporary.mkdir()
    manifest = manifest_of(plan_of(1), (ManifestFile(0, "shard-0-of-1.safetensors", 9, "00", 0),))
    with pytest.raises(CheckpointError, match="is missing or has not its 9 bytes"):
        commit(temporary, tmp_path / "step", manifest)
    assert not (tmp_path / "step").exists()
