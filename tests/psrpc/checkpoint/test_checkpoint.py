"""Checkpoints: any number of shards into any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from psrpc.checkpoint.checkpoint import (
    Manifest,
    ShardState,
    commit,
    newest_good,
    read_manifest,
    verify,
)
from psrpc.checkpoint.load import load_state, load_variables
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.checkpoint.shard_file import shard_file_name
from psrpc.checkpoint.shard_reader import ShardReader
from psrpc.core.document import LARGEST, MOST_CONTAINERS
from psrpc.core.errors import CheckpointError
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, VariableSpec
from psrpc.net.limits import MAX_MESSAGE_BYTES
from tests.psrpc.builders import (
    VALUES,
    VARIABLES,
    assert_state,
    manifest_of,
    plan_of,
    state_of,
    write,
)


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
    """Even with a manifest sealed over them."""
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


@pytest.mark.parametrize("name", ["layer_{}/kernel", "functional/block/attention_{}/query/kernel"])
def test_the_largest_plan_of_a_message_has_checkpoints_that_can_be_read(
    tmp_path: Path, name: str
) -> None:
    """A part of it, in proportion: documents grow with the number of variables."""
    specs = [VariableSpec(name.format(i), (1, 1), "float32", "trainable") for i in range(1000)]
    plan = make_plan(specs, 1, "cut")
    values = {arena.name: np.zeros(1000, np.float32) for arena in plan.arenas}
    slots = ("momentum", "velocity", "velocity_hat")
    state = ShardState(values=values, elements=dict.fromkeys(slots, values))
    directory = write(tmp_path, plan, states=[state])
    header = (directory / shard_file_name(0, 1)).read_bytes()[:-16000]
    for document in (header, (directory / MANIFEST).read_bytes()):
        times = MAX_MESSAGE_BYTES / len(plan.to_json())
        assert len(document) * times < LARGEST
        assert (document.count(b"[") + document.count(b"{")) * times < MOST_CONTAINERS


def test_a_checkpoint_that_cannot_be_read_back_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psrpc.core.document.LARGEST", 1000)
    with pytest.raises(CheckpointError, match=r"header could not be read again.*expected 1000 at"):
        write(tmp_path, plan_of(1))
    (temporary := tmp_path / ".tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest could not be read again.*full_checkpoint"):
        commit(temporary, tmp_path / "step-5", manifest_of(plan_of(1), ()))
    assert not (tmp_path / "step-5").exists()
