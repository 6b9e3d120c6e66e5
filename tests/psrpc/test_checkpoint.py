"""Checkpoints: any number of shards into any other, and nothing torn or changed is loaded."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from psrpc.manifest import find_checkpoints, remove_checkpoint
from psrpc.plan import Placement, Plan, VariableSpec, make_plan
from psrpc.shard_reader import ShardReader
from psrpc.storage import Disk

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
        written = read_manifest(directory).files[shard]
        with ShardReader(directory / written.name, written.nbytes, written.sha256) as file:
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
    verify(directory, manifest)
    text = (directory / "manifest.json").read_bytes()
    assert json.loads(text)["format"] == 2
    assert Manifest.from_json(text).to_json() == text


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    text = (directory / "manifest.json").read_bytes()
    for at in range(len(text)):
        changed = text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1 :]
        with pytest.raises(ValueError, match=r"SHA-256|format"):
            Manifest.from_json(changed)
        with pytest.raises(ValueError, match="SHA-256"):
            Manifest.from_json(text[:at])


def test_a_manifest_of_an_earlier_format_is_refused_by_name(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    document = json.loads((directory / "manifest.json").read_text())
    del document["sha256"]
    (directory / "manifest.json").write_text(json.dumps({**document, "format": 1}))
    with pytest.raises(CheckpointError, match="its format is 1; this version reads 2"):
        read_manifest(directory)


def test_files_of_another_step_or_shard_are_not_what_the_manifest_means(tmp_path: Path) -> None:
    """Even where somebody sealed a manifest over them."""
    plan = plan_of(2)
    directory = write(tmp_path, plan)
    manifest = read_manifest(directory)
    sealed = directory / "manifest.json"
    sealed.write_bytes(replace(manifest, global_step=6).to_json())
    with pytest.raises(CheckpointError, match="global_step 5; its manifest says 6"):
        load_state(directory, plan, 0)
    one, two = manifest.files
    swapped = (replace(one, shard=1), replace(two, shard=0))
    sealed.write_bytes(replace(manifest, files=swapped).to_json())
    with pytest.raises(CheckpointError, match="is of shard 1; its manifest says 0"):
        load_state(directory, plan, 0)
    sealed.write_bytes(replace(manifest, files=(one, one)).to_json())
    with pytest.raises(CheckpointError, match=r"files of shards \[0, 0\]; expected all of 2"):
        load_state(directory, plan, 0)


def test_files_of_two_shards_that_changed_places_are_found(tmp_path: Path) -> None:
    """They have the same size, and each is whole."""
    variables = [VariableSpec(name, (16,), "float32", "trainable") for name in ("one", "two")]
    plan = make_plan(variables, 2, "cut")
    (arena,) = plan.arenas
    states = [ShardState({arena.name: np.full(16, shard, "float32")}) for shard in range(2)]
    directory = write(tmp_path, plan, states=states)
    manifest = read_manifest(directory)
    one, two = (directory / file.name for file in manifest.files)
    assert one.stat().st_size == two.stat().st_size
    spare = one.rename(directory / "spare")
    two.rename(one)
    spare.rename(two)
    with pytest.raises(CheckpointError, match=r"shard-0-of-2\S* has SHA-256"):
        verify(directory, manifest)
    for shard in range(2):
        with pytest.raises(CheckpointError, match=f"is of shard {1 - shard}"):
            load_state(directory, plan, shard)


class CountingDisk(Disk):
    """Counts the bytes of shards' files that are read."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path: Path) -> io.BufferedIOBase:
        self.opened.append(path.name)
        return super().open(path)


def test_a_shard_reads_its_own_file_and_reads_it_once(tmp_path: Path) -> None:
    plan = plan_of(3)
    directory = write(tmp_path, plan)
    damaged = directory / shard_file_name(2, 3)
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    disk = CountingDisk()
    assert_state(load_state(directory, plan, 1, storage=disk), state_of(plan, 1))
    assert disk.opened == ["manifest.json", "shard-1-of-3.safetensors"]
    with pytest.raises(CheckpointError, match="shard-2-of-3"):
        load_state(directory, plan, 2)
    with pytest.raises(CheckpointError, match="shard-2-of-3"):
        load_state(directory, plan_of(2), 0)


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
    exchanged = write(tmp_path, plan, step=50)
    exchanged.rename(tmp_path / "step-00000060")
    choice = newest_good(tmp_path)
    assert choice.directory == good
    assert choice.manifest.global_step == 10
    reasons = dict(choice.refused)
    assert reasons.keys() == {torn, changed, empty, tmp_path / "step-00000060"}
    assert "is of step-00000050" in reasons[tmp_path / "step-00000060"]
    assert "bytes; expected" in reasons[torn]
    assert "SHA-256" in reasons[changed]
    assert "no manifest.json" in reasons[empty]
    assert older not in reasons


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    assert newest_good(tmp_path, "run-1").directory == directory
    with pytest.raises(CheckpointError, match="is of run run-1; expected run-2"):
        newest_good(tmp_path, "run-2")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    directory = write(tmp_path, plan_of(1))
    before = read_manifest(directory)
    with pytest.raises(CheckpointError, match="cannot be committed: Directory not empty"):
        write(tmp_path, plan_of(1))
    assert newest_good(tmp_path).manifest == before
    with pytest.raises(CheckpointError, match="File exists"):
        write_shard_file(
            directory / before.files[0].name,
            plan_of(1),
            0,
            state_of(plan_of(1), 0),
            run_id="r",
            generation=1,
            global_step=0,
        )
    verify(directory, before)


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path) -> None:
    old, new = (write(tmp_path, plan_of(1), step=step) for step in (5, 6))

    class Stuck(Disk):
        def remove(self, directory: Path) -> None:
            raise OSError(5, "Input/output error")

    with pytest.raises(CheckpointError, match=r"step-00000005 cannot be removed: Input/output"):
        remove_checkpoint(old, Stuck())
    assert [d for d, _ in find_checkpoints(tmp_path).manifests] == [new]
    assert find_checkpoints(tmp_path).refused == ()
    remove_checkpoint(new)
    assert find_checkpoints(tmp_path).manifests == ()


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
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*shard-0-of-1"):
        commit(temporary, tmp_path / "step", manifest)
    assert not (tmp_path / "step").exists()
