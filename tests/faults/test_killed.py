"""Killed once before every call that a checkpoint and the ledger make to the file system."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.checkpoints.checkpoints import Checkpoints, remove_unfinished
from coordinator.records.store import Store
from coordinator.records.stored_values import GENERATION
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.checkpoint.load import load_state
from psrpc.core.errors import CheckpointError
from tests.coordinator.builders import make_run
from tests.faults.scenarios import LEDGER, ROUNDS, SHARDS, decision, save, state_of
from tests.faults.strace import Call, Outcome, Zygote, needs_strace

pytestmark = [pytest.mark.slow, needs_strace]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be, which makes no difference to a process that is killed."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as path:
        yield Path(path)


def kill_everywhere(
    zygote: Zygote, scenario: str, root: Path
) -> Iterator[tuple[Call, Path, Outcome]]:
    """Runs the scenario once whole, and then once for each of its calls, killed before that."""
    whole = zygote.run(scenario, root / "whole")
    assert whole.status == 0, whole.words
    for index, call in enumerate(whole.calls_on(root / "whole")):
        directory = root / f"{index}"
        fault = f"{call.name}:signal=SIGKILL:when={call.number}"
        outcome = zygote.run(scenario, directory, fault)
        assert outcome.status == -9, f"not killed before {call.text}"
        # It was the very call, and it was not made.
        last = outcome.calls[-1].text
        assert last.split("(")[0] == call.name
        assert last.endswith("= ?"), last
        yield call, directory, outcome


def number_said(outcome: Outcome, what: str) -> int:
    said = [re.findall(rf"^{what} (\d+)", word) for word in outcome.words]
    return max((int(found[0]) for found in said if found), default=0)


def test_a_checkpoint_is_there_whole_or_not_at_all(zygote: Zygote, root: Path) -> None:
    seen = set()
    kinds = set()
    for call, run_dir, outcome in kill_everywhere(zygote, "checkpoints", root):
        committed = number_said(outcome, "committed")
        plan = make_run(run_dir, shards=SHARDS, generation=1).plan
        try:
            choice = newest_good(run_dir / "checkpoints")
        except CheckpointError:
            assert committed == 0, call.text
            found = 0
        else:
            found = choice.manifest.global_step
            assert choice.refused == (), call.text
            for shard in range(SHARDS):
                state = load_state(choice.directory, plan, shard, "r1")
                for name, array in state_of(plan, shard, found).values.items():
                    np.testing.assert_array_equal(state.values[name], array)
        # What was told to others is there; the last word may have been lost on its way.
        assert found in (committed, committed + 1), call.text
        go_on(run_dir, found)
        seen.add((committed, found))
        kinds.add(call.name)
    assert seen == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)}
    assert kinds >= {"mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir"}


def go_on(run_dir: Path, found: int) -> None:
    """A coordinator that takes over makes the next checkpoint and leaves no rubbish."""
    remove_unfinished(run_dir)
    run = make_run(run_dir, shards=SHARDS, generation=2, keep_checkpoints=1)
    made = Checkpoints(run)
    save(made, run_dir, run.plan, found + 1, 2)
    assert made.retain({}) == ()
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert names == [f"step-{found + 1:08d}.g2"]


def test_announced_ledger_entries_are_there(zygote: Zygote, root: Path) -> None:
    seen = set()
    for call, run_dir, outcome in kill_everywhere(zygote, "ledger", root):
        generation = number_said(outcome, "generation")
        rounds = [
            int(word.split()[2]) for word in outcome.words if word.startswith(f"round {generation}")
        ]
        if (run_dir / LEDGER).exists():
            with sqlite3.connect(run_dir / LEDGER) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
        with Store(run_dir / LEDGER) as store:
            found = store.get(GENERATION) or 0
            decided = store.last_decision(since=max(1, found))
            number = -1 if decided is None else decided.round
            if decided is not None:
                assert decided == decision(found, number), call.text
            assert found in (generation, generation + 1), call.text
            if found == generation:
                assert number in (len(rounds) - 1, len(rounds)), call.text
            store.put_decision(decision(3, 0))
            assert store.last_decision(since=1) == decision(3, 0)
        seen.add((found, number))
    assert seen >= {(g, n) for g in (1, 2) for n in range(ROUNDS)}


def test_announced_ledger_entries_outlive_a_power_failure(zygote: Zygote, root: Path) -> None:
    """Which takes what was written and not synced."""
    outcome = zygote.run("ledger", root / "whole")
    said, written = 0, 0
    unsynced: set[str] = set()
    for call in outcome.calls:
        if f"{root / 'whole'}.words>" in call.text:
            assert not unsynced, f"{call.text} after nothing but writes to {unsynced}"
            said += 1
        # The index of the log (-shm) is made anew from it.
        found = re.search(rf"\(\d+<[^>]*/({LEDGER}(-wal)?)>", call.text)
        if found and "sync" in call.name:
            unsynced.discard(found[1])
        elif found and "write" in call.name:
            unsynced.add(found[1])
            written += 1
    assert said == len(outcome.words)
    assert written >= said
