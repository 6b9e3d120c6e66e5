"""Invariants at the end of a schedule; each function returns violations, a line each."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pserver.snapshots.row_files import fill_tables
from pserver.tables.tables import Tables
from psrpc.checkpoint.checkpoint import ShardState
from psrpc.checkpoint.choice import newest_good
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.core.batch import BatchId
from psrpc.core.errors import CheckpointError
from tests.chaos.cluster import Process
from tests.chaos.injector import Record
from tests.chaos.observer import Sight
from tests.chaos.reference import Reference
from tests.chaos.row_witness import check_rows, named_by, shard_ids
from tests.chaos.schedule import ENDING
from tests.chaos.witness import BATCH_SIZE, WITNESS, Array, Options, Torn, check_values
from tests.chaos.worker_process import EXIT_TORN
from tests.sim.table_witness import contents_now


def check_end(run: Path, options: Options, ended: bool) -> list[str]:
    """The job ended by itself, and says that it is done."""
    if not ended:
        return ["the job did not end"]
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return [f"there is no summary: {error}"]
    found = []
    expected = {
        "phase": "done",
        "global_step": options.total_steps,
        "batches": options.total_batches,
        "examples": (options.total_batches - (options.poisoned is not None)) * BATCH_SIZE,
    }
    for key, value in expected.items():
        if summary.get(key) != value:
            found.append(f"the summary has {key} {summary.get(key)!r}; expected {value!r}")
    return found


def check_final_state(run: Path, options: Options, reference: Path | None = None) -> list[str]:
    """Every batch is in the last checkpoint of every shard once, and nothing else is.

    Args:
        reference: the checkpoint that a job with TensorFlow must come to; where there is none its
            values are not looked at.
    """
    try:
        choice = newest_good(run / "checkpoints")
    except CheckpointError as error:
        return [f"there is no good checkpoint: {error}"]
    found = []
    if choice.refused:
        found.append(f"damaged checkpoints: {choice.refused}")
    if choice.manifest.global_step != options.total_steps:
        found.append(f"the last checkpoint is of step {choice.manifest.global_step}")
    plan = choice.manifest.plan
    states = [load_state(choice.directory, plan, shard) for shard in range(plan.shards)]
    for shard, state in enumerate(states):
        found += _check_applied(options, shard, state)
    if options.tensorflow:
        if reference is not None:
            expected = [load_state(reference, plan, shard) for shard in range(options.shards)]
            found += _compare(states, expected)
        return found
    values: dict[str, Any] = {
        arena.name: np.concatenate([state.values[arena.name] for state in states])
        for arena in plan.arenas
    }
    try:
        check_values(options, values, options.total_steps if options.fixed else None)
    except Torn as error:
        found.append(f"the last checkpoint: {error}")
    witness = values[WITNESS].reshape(options.shards, options.piece)
    for shard in range(options.shards):
        missing = set(np.flatnonzero(witness[shard, : options.total_batches] == 0).tolist())
        missing -= {options.poisoned}
        if missing:
            found.append(f"shard {shard} never had batches {sorted(missing)[:8]}")
    if options.fixed:
        reference_run = Reference(options)
        found += _compare(states[options.slices :], reference_run.run())
        for shard, expected_rows in enumerate(reference_run.tables()):
            held = _load_tables(choice.directory, options, shard)
            found += _compare_tables(f"shard {shard}", held, expected_rows)
    return found


def check_cuts(run: Path, options: Options) -> list[str]:
    """In every checkpoint that is kept, parameters, slots, rows and applied-set of each shard say
    the same. The witness model only."""
    found = []
    for directory in sorted((run / "checkpoints").glob("step-*")):
        for shard in range(options.shards):
            state = load_state(directory, options.plan, options.slices + shard)
            recorded = _batches(options, state, "applied") - _batches(options, state, "skipped")
            ones = state.values[WITNESS][: options.total_batches]
            held = set(np.flatnonzero(ones).tolist())
            updates = len({batch // options.policy.taken for batch in held})
            if not options.fixed:
                updates = len(held) // options.policy.taken
            # A sum of the gradients of all devices is one update.
            fewest = -(-updates // options.devices) if options.sums else updates
            iterations = int(state.scalars["iterations"])
            who = f"{directory.name}, shard {shard}"
            if held != recorded:
                odd = sorted(held ^ recorded)[:8]
                found.append(f"{who}: parameters and applied-set differ in batches {odd}")
            if not fewest <= iterations <= updates:
                found.append(f"{who}: {iterations} updates by its slots, {updates} by its values")
            if options.slices:
                beside = load_state(directory, options.plan, shard)
                if _batches(options, beside, "applied") != _batches(options, state, "applied"):
                    found.append(f"{who}: its slice has applied other batches than its rows")
            if options.rows:
                found += _check_tables(who, directory, options, shard, ones != 0)
    return found


def _check_tables(
    who: str, directory: Path, options: Options, shard: int, trained: Array
) -> list[str]:
    """There are exactly the rows that the batches ``trained``, ``[batches]``, name, and each was
    updated once for each of them."""
    tables = _load_tables(directory, options, shard)
    found, rows = [], []
    ids = shard_ids(options.shards, options.total_batches)[shard]
    for table, every, counts in zip(
        tables.tables, (ids.growing, ids.fixed), named_by(trained), strict=True
    ):
        values = np.empty((len(every), table.spec.width), np.float32)
        table.read(every, values)
        rows.append(values)
        name = f"{who}: table {table.spec.name}"
        if (table.present(every) != (counts > 0)).any() or len(table) != (counts > 0).sum():
            found.append(f"{name} has {len(table)} rows; its batches name {(counts > 0).sum()}")
            continue
        if options.policy.taken == 1:
            # Otherwise an update may be of several batches.
            held = contents_now(tables)[tables.tables.index(table)].rows
            expected = counts[counts > 0]
            if (held.counts != expected).any():
                found.append(f"{name} counts {held.counts.tolist()}, not {expected.tolist()}")
    try:
        check_rows(options, rows, trained)
    except Torn as error:
        found.append(f"{who}: {error}")
    return found


def _load_tables(directory: Path, options: Options, shard: int) -> Tables:
    tables = Tables(options.plan, shard)
    fill_tables(tables, load_rows(directory, options.plan, shard))
    return tables


def _compare_tables(who: str, tables: Tables, expected: Tables) -> list[str]:
    """The same bits in all rows and slots, but for the versions: those go on from where a restart
    began."""
    found = []
    pairs = zip(tables.specs, contents_now(tables), contents_now(expected), strict=True)
    for spec, held, other in pairs:
        same = replace(other, rows=replace(other.rows, touched=held.rows.touched))
        if different := held.differs(same):
            found.append(f"{who}: table {spec.name} ends with other {different}")
    return found


def _batches(options: Options, state: ShardState, key: str) -> set[int]:
    """Batches by their number, of an applied-set."""
    return {
        options.number(BatchId(entry["epoch"], first, BATCH_SIZE))
        for entry in state.applied
        for start, stop in entry[key]
        for first in range(start, stop, BATCH_SIZE)
    }


def _check_applied(options: Options, shard: int, state: ShardState) -> list[str]:
    records = options.batches * BATCH_SIZE
    expected = []
    for epoch in range(options.epochs):
        skipped = []
        if options.poisoned is not None and options.poisoned // options.batches == epoch:
            first = options.poisoned % options.batches * BATCH_SIZE
            skipped = [[first, first + BATCH_SIZE]]
        expected.append({"epoch": epoch, "applied": [[0, records]], "skipped": skipped})
    have = [
        {
            "epoch": entry["epoch"],
            "applied": [list(piece) for piece in entry["applied"]],
            "skipped": [list(piece) for piece in entry["skipped"]],
        }
        for entry in state.applied
    ]
    if have != expected:
        return [f"shard {shard} has applied {have}; expected {expected}"]
    return []


def _compare(states: Sequence[ShardState], reference: Sequence[ShardState]) -> list[str]:
    """The same bits in parameters and slots."""
    found = []
    for shard, (state, expected) in enumerate(zip(states, reference, strict=True)):
        for name, array in expected.values.items():
            if state.values[name].tobytes() != array.tobytes():
                differ = np.flatnonzero(state.values[name] != array)
                found.append(
                    f"shard {shard}: {name} has other bits than without faults, in"
                    f" {len(differ)} of {len(array)} elements from {differ[:1]}"
                )
        if state.elements.keys() != expected.elements.keys():
            found.append(f"shard {shard} has slots {sorted(state.elements)}")
            continue
        for slot, arrays in expected.elements.items():
            for name, array in arrays.items():
                if state.elements[slot][name].tobytes() != array.tobytes():
                    found.append(f"shard {shard}: slot {slot} of {name} has other bits")
        for name, scalar in expected.scalars.items():
            if state.scalars[name] != scalar:
                found.append(f"shard {shard}: {name} is {state.scalars[name]}, not {scalar}")
    return found


def check_sights(sights: Sequence[Sight]) -> list[str]:
    """Neither (generation, global step) nor the policy's number goes back for who looks at the
    status."""
    found = []
    for one, after in pairwise(sights):
        if (after.generation, after.step) < (one.generation, one.step):
            found.append(
                f"the status went back from generation {one.generation} step {one.step}"
                f" ({one.phase}) to generation {after.generation} step {after.step}"
                f" ({after.phase})"
            )
        if after.policy < one.policy:
            found.append(f"policy {after.policy} stands after policy {one.policy}")
    return found


def check_processes(history: Sequence[Process], touched: Collection[str]) -> list[str]:
    """No process ended but those that were ordered to, or were told that the job is over.

    Args:
        touched: places that a fault has hit.
    """
    found = []
    for process in history:
        who = f"{process.name} (pid {process.pid}, {process.log.name})"
        if process.status is None:
            found.append(f"{who} is still there")
        elif process.status == EXIT_TORN:
            found.append(f"{who} saw torn parameters: {_last_line(process.log)}")
        elif process.late and process.name not in touched:
            found.append(f"{who} was never told that the job is over")
        elif process.status != 0 and not process.ordered:
            found.append(f"{who} ended with {process.status}: {_last_line(process.log)}")
    return found


def check_logs(logs: Path) -> list[str]:
    """No exception went unhandled."""
    found = []
    for log in sorted(logs.glob("*.log")):
        text = log.read_text(errors="replace")
        if "Traceback (most recent call last)" in text:
            place = text.index("Traceback (most recent call last)")
            last = text[place : place + 4000].strip().splitlines()[-1]
            found.append(f"{log.name} has a traceback: {last}")
    return found


def check_faults(records: Sequence[Record]) -> list[str]:
    """Every fault happened, but those that came too late."""
    return [
        f"this fault did not fire: {record.fault}"
        for record in records
        if not (record.proof or record.late or record.fault.step == ENDING)
    ]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
