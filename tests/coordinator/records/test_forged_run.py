"""A run directory that is forged or rotten: each command ends with one line that names the file and
what is wrong, and a run goes on from an older checkpoint."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.checkpoints.choice import choose_checkpoint
from coordinator.cli.__main__ import main
from coordinator.core.applied import common_positions, partial_positions
from coordinator.core.description_reader import read_description
from coordinator.dashboard.snapshots import NAME, DashboardSnapshots
from coordinator.records.run_directory import LEDGER, RunDirectory, Starting, remembered
from coordinator.records.store import Store
from coordinator.schedule.open_batches import OpenBatches
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.core.errors import InvalidJob
from psrpc.core.intervals import IntervalSet
from psrpc.files.run_paths import newest_run, read_ending, read_summary, unfinished_run
from psrpc.files.storage import replace_text
from tests.coordinator.builders import describe, description_json
from tests.psrpc.builders import plan_of, write
from tests.psrpc.checkpoint.test_forgery import PLACED, as_fifo
from tests.psrpc.forging import CHANGES, DEEP, Change, forged, places, put, sealed, text_of

NEWEST = "step-00000020"

SUMMARY: dict[str, Any] = {
    "run_id": "a",
    "job": "job",
    "phase": "done",
    "reason": "",
    "mode": "sync",
    "replicas": 2,
    "global_step": 20,
    "total_steps": 20,
    "loss": None,
    "policy": {"policy": 1, "words": "sync replicas=2"},
    "eval": {"loss": 0.5},
    "evaluations": [{"evaluation": "epoch-0", "global_step": 10, "loss": 0.5}],
    "staleness_counts": [3, 1],
    "counted": {
        "batches": 20,
        "counted": 19,
        "skipped": 1,
        "twice": 0,
        "missing_batches": ["batch 3"],
        "skipped_batches": [],
    },
    "restarts": {"shard-0": 1},
    "warnings": ["one"],
    "wall_s": 3.5,
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has ended, with two checkpoints."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs" / "job-1"
    root.mkdir(parents=True)
    description = description_json(keep_checkpoints=1)
    (root / "job.json").write_text(json.dumps({"job": "job.py", "description": description}))
    for step in (10, 20):
        write(root / "checkpoints", plan_of(2), step=step)
    with Store(root / LEDGER) as store:
        store.put("generation", 1)
    (root / "logs").mkdir()
    (root / "logs" / "shard-0.log").write_text("one\n")
    (root / "summary.json").write_text(json.dumps(SUMMARY))
    return root


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status and output of a command."""
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def forge(run_dir: Path, place: tuple[str | int, ...], change: Change) -> None:
    path = run_dir / "checkpoints" / NEWEST / MANIFEST
    path.write_bytes(sealed(forged(json.loads(path.read_bytes()), place, change)))


MANIFESTS: list[Any] = [
    *PLACED,
    (("details", "x"), DEEP, "nested more than 64 deep"),
    (("global_step",), "20", "global_step is '20'; expected a whole number"),
    (("plan", "shards"), 10**9, "shards is 1000000000; expected a whole number"),
    (("plan", "variables", 0, "shape", 0), float("inf"), "Infinity is no JSON"),
    (("name",), "step-00000010", "is of step-00000010"),
]


@pytest.mark.parametrize("forgery", MANIFESTS, ids=lambda forgery: forgery[-1][:20])
def test_the_older_checkpoint_is_taken_and_each_command_names_the_newest(
    run_dir: Path, capsys: pytest.CaptureFixture[str], forgery: tuple[Any, ...]
) -> None:
    newest = run_dir / "checkpoints" / NEWEST
    if len(forgery) == 2:
        (newest / MANIFEST).unlink()
        forgery[0](newest / MANIFEST)
    else:
        forge(run_dir, forgery[0], put(forgery[1]))
    words = forgery[-1]
    plan = plan_of(2)
    variables = [vars(spec) | {"shape": list(spec.shape)} for spec in plan.variables]
    job = describe(data_fingerprint="abc", batch_size=10, variables=variables)
    chosen = choose_checkpoint(run_dir, job, plan=plan)
    assert chosen.restored.global_step == 10
    (remark,) = (remark for remark in chosen.remarks if "passed over" in remark)
    assert remark.startswith(f"passed over {NEWEST}: ")
    assert str(newest) in remark
    assert words in remark
    status, out, _ = called(capsys, "checkpoint", "ls", run_dir)
    assert status == 0
    assert "step-00000010" in out.splitlines()[1]
    assert out.splitlines()[2].startswith(NEWEST)
    assert words in out.splitlines()[2]
    status, out, _ = called(capsys, "checkpoint", "verify", run_dir)
    assert status == 1
    assert [line for line in out.splitlines() if words in line and str(newest) in line]
    assert out.splitlines()[-1] == "the newest good one is step-00000010"
    status, out, err = called(capsys, "checkpoint", "diff", newest, "step-00000010")
    assert status == 2
    assert words in err
    assert len(err.splitlines()) == 1
    status, out, err = called(capsys, "checkpoint", "prune", run_dir)
    assert (status, out) == (0, "1 left\n")
    status, out, err = called(capsys, "export", run_dir, "--tables", run_dir / "tables")
    assert status == 0
    assert words in err.splitlines()[0]


@pytest.mark.parametrize(("place", "words"), PLACED)
def test_nothing_of_a_run_is_awaited(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    place: Callable[[Path], None],
    words: str,
) -> None:
    words = words.removesuffix(" bytes; expected")
    names = ("summary.json", "job.json", "address", "lock", "starting", NAME, "token")
    for name in (*names, "logs/shard-0.log"):
        (run_dir / name).unlink(missing_ok=True)
        place(run_dir / name)
        # What is written in their place comes under this name first.
        if "/" not in name:
            place(run_dir / f".{name}.tmp")
    # None of them is newer than another.
    status, _, err = called(capsys, "status", "--run-dir", run_dir)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert f"{run_dir}/" in err
    status, _, err = called(capsys, "env", "--run-dir", run_dir)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "job.json: " in err
    assert words in err
    status, _, err = called(capsys, "export", run_dir, "--to", "model.keras")
    assert (status, len(err.splitlines())) == (2, 1)
    assert words in err
    status, _, err = called(capsys, "checkpoint", "prune", run_dir)
    assert (status, len(err.splitlines())) == (2, 1)
    assert read_ending(run_dir) == read_summary(run_dir) == {}
    assert newest_run("job") is None
    assert unfinished_run("job") is None
    assert remembered(run_dir, Path(__file__), [], None, None) is None
    board = DashboardSnapshots("job", lambda: 1.0)
    board.open("a", run_dir)
    board.save()
    if place is as_fifo:
        status, _, err = called(capsys, "logs", "--run-dir", run_dir)
        assert (status, len(err.splitlines())) == (2, 1)
        assert f"shard-0.log cannot be read: {words}" in err
        with RunDirectory(run_dir, resume=False) as directory:
            assert directory.token() == ""
            assert directory.new_token() == directory.token()
            directory.write_address("localhost:1")
            directory.write_job({})
            assert (run_dir / "address").read_text() == "localhost:1\n"


def test_an_address_that_is_none(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "summary.json").unlink()
    for text in (b"\xff\xfe", b"x" * 5000):
        (run_dir / "address").write_bytes(text)
        status, _, err = called(capsys, "status", "--run-dir", run_dir)
        assert (status, len(err.splitlines())) == (2, 1)
        assert f"{run_dir / 'address'} cannot be read: " in err


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((), [], "it is []; expected an object"),
        (("global_step",), "20", "global_step is '20'; expected a whole number"),
        (("global_step",), 2**64 - 1, "global_step is 18446744073709551615; expected a whole"),
        (("loss",), float("nan"), "NaN is no JSON"),
        (("policy",), [], "policy is []; expected an object"),
        (("evaluations", 0, "loss"), "x", "evaluations[0].loss is 'x'; expected a number"),
        (("counted", "missing_batches"), [1], "missing_batches[0] is 1; expected text"),
        (("restarts", "shard-0"), None, "restarts.shard-0 is None; expected a whole number"),
        (("warnings",), DEEP, "nested more than 64 deep"),
        (("job",), "\ud800", "surrogates not allowed"),
    ],
)
def test_a_summary_that_is_none(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    place: tuple[str | int, ...],
    value: Any,
    words: str,
) -> None:
    path = run_dir / "summary.json"
    path.write_text(text_of(forged(SUMMARY, place, put(value))))
    for more in ((), ("--json",)):
        status, out, err = called(capsys, "status", "--run-dir", run_dir, *more)
        assert (status, out) == (2, "")
        assert f"how the run has ended is not known, {path} cannot be read: " in err
        assert words in err
        assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_any_value_in_a_summary_is_shown_or_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "summary.json"
    assert called(capsys, "status", "--run-dir", run_dir)[0] == 0
    for place in places(SUMMARY):
        for change in (*random.Random(str(place)).sample(CHANGES, 4), CHANGES[-1]):
            if not place and change in CHANGES[-2:]:
                continue
            path.write_text(text_of(forged(SUMMARY, place, change)))
            for more in ((), ("--json",)):
                status, _, err = called(capsys, "status", "--run-dir", run_dir, *more)
                assert (status, len(err.splitlines())) in ((0, 0), (2, 1))


@pytest.mark.slow
def test_any_value_in_a_description_is_taken_or_refused() -> None:
    document = description_json(keep_best={"metric": "accuracy", "lower": False}, slots=["a"])
    read_description(document)
    for place in places(document):
        for change in CHANGES:
            if place or change not in CHANGES[-2:]:
                try:
                    read_description(forged(document, place, change))
                except InvalidJob:
                    continue


@pytest.mark.parametrize("kind", ["text", "fifo", "value"])
def test_a_ledger_that_is_needed_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    description = description_json(keep_best={"metric": "accuracy", "lower": False})
    (run_dir / "job.json").write_text(json.dumps({"description": description}))
    path = run_dir / LEDGER
    if kind == "value":
        with Store(path) as store:
            store.put_evaluation("epoch-0", 1, 10, {"accuracy": [1]})  # type: ignore[dict-item]
    else:
        path.unlink()
        as_fifo(path) if kind == "fifo" else path.write_text("no database" * 500)
    words = {"text": "file is not a database", "fifo": "It is a FIFO", "value": "accuracy is [1]"}
    for action in ("ls", "prune"):
        status, _, err = called(capsys, "checkpoint", action, run_dir)
        assert (status, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"error PS406: {path} ")
        assert words[kind] in err


def test_starting_a_run_waits_for_no_reader(run_dir: Path) -> None:
    as_fifo(run_dir / "starting")
    starting = Starting(run_dir)
    starting.hold()
    assert newest_run() == Path("runs") / run_dir.name
    starting.release()
    assert not (run_dir / "starting").exists()


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    as_fifo(tmp_path / ".file.tmp")
    replace_text(tmp_path / "file", "one")
    replace_text(tmp_path / "file", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "two"


def test_no_terminal_obeys_a_name_or_a_reason(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (b"step-\xff", b"step-\n\x1b[2J"):
        (run_dir / "checkpoints" / os.fsdecode(name)).mkdir()
    found = find_checkpoints(run_dir / "checkpoints")
    assert [path.name for path, _ in found.manifests] == [NEWEST, "step-00000010"]
    assert len(found.refused) == 2
    (run_dir / "summary.json").write_text(
        json.dumps(SUMMARY | {"reason": "\x1b[2J", "mode": "[red]\x1b"})
    )
    for command in (
        ("checkpoint", "ls", run_dir),
        ("checkpoint", "verify", run_dir),
        ("export", run_dir, "--tables", run_dir / "tables"),
        ("status", "--run-dir", run_dir),
    ):
        _, out, err = called(capsys, *command)
        assert all(c == "\n" or c.isprintable() for c in (out + err).replace("\ufffd", "?"))


positions = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=5), min_size=1, max_size=4
)


@settings(derandomize=True, database=None)
@given(positions)
def test_partial_positions_are_those_of_some_members_and_not_all(
    each: list[list[tuple[int, int]]],
) -> None:
    members = [{x for a, n in one for x in range(a, a + n)} for one in each]
    sets = [{0: IntervalSet((a, a + n) for a, n in one)} for one in each]
    found = partial_positions(sets, common_positions(sets)).get(0, IntervalSet())
    apart = members[0].union(*members) - members[0].intersection(*members)
    assert {x for a, b in found for x in range(a, b)} == apart


def test_positions_beyond_the_data_are_no_batches() -> None:
    batches = OpenBatches(
        records=20,
        batch_size=4,
        epochs=1,
        done={0: IntervalSet([(0, 4)])},
        partial={0: IntervalSet([(8, 1 << 50)])},
    )
    assert [batch.first for batch in iter(batches.take, None)] == [4]
    assert [batch.first for batch in iter(batches.take_partial, None)] == [8, 12, 16]
