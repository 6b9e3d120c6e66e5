"""Damaged files of a checkpoint never load as anything but what was written.

Every variant damages the newest of two checkpoints (sometimes both) in a way that a disk, a crash
or a person can. Then the older one is chosen and the damage is named, or nothing is.
"""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint import rows_reader, shard_reader
from psrpc.checkpoint.checkpoint import ShardState, newest_good, shard_file_name
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.manifest import MANIFEST, Manifest
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.checkpoint.rows_file import rows_file_name
from psrpc.core.errors import CheckpointError
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.files.storage import Written
from tests.psrpc.rows import TABLES, Contents, mine, restored, rows_of, trained, write_checkpoint

ROOT = Path("/checkpoints")
SHARDS = 2
OLD, NEW = ROOT / "step-00000010", ROOT / "step-00000020"
VARIABLES = (
    VariableSpec("kernel", (5, 9), "float32", "trainable"),
    VariableSpec("bias", (24,), "float32", "trainable"),
)
PLAN = make_plan(VARIABLES, SHARDS, "cut", TABLES)
PLANS = (PLAN, make_plan(VARIABLES, 1, "cut", TABLES))
FAST, ALL = 30, 500
"""Variants of each kind."""

Files = dict[Path, bytes]


class Memory:
    """A disk that is a dictionary, and notes where it was looked."""

    def __init__(self, files: Files | None = None) -> None:
        self.files: Files = dict(files or {})
        self.looked: set[Path] = set()

    def make_directory(self, path: Path) -> None:
        """Directories are where files are."""

    def is_empty(self, path: Path) -> bool:
        return not any(path in file.parents for file in self.files)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        self.files[path] = b"".join(bytes(part) for part in parts)
        return Written(len(self.files[path]), sha256(self.files[path]).hexdigest())

    def link(self, old: Path, new: Path) -> None:
        self.files[new] = self.files[old]

    def sync(self, directory: Path) -> None:
        """Everything lasts."""

    def rename(self, old: Path, new: Path) -> None:
        for path in [path for path in self.files if path.parent == old]:
            self.files[new / path.name] = self.files.pop(path)

    def remove(self, directory: Path) -> None:
        for path in [path for path in self.files if path.parent == directory]:
            del self.files[path]

    def remove_empty(self, directory: Path) -> None:
        """Directories are where files are."""

    def open(self, path: Path) -> io.BufferedIOBase:
        self.looked.add(path)
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return io.BytesIO(self.files[path])

    def directories(self, path: Path) -> list[str]:
        self.looked.add(path)
        return sorted({file.parent.name for file in self.files})

    def free(self, path: Path) -> int:
        return 1 << 40


def state_of(plan: Plan, shard: int, step: int, run: str) -> ShardState:
    """Values that are told apart from those of any other step, run and element."""
    first = 1000.0 * step + sum(run.encode())
    values = {
        arena.name: first + np.arange(arena.cuts[shard], arena.cuts[shard + 1], dtype=arena.dtype)
        for arena in plan.arenas
    }
    return ShardState(
        values=values,
        elements={"momentum": {name: -array for name, array in values.items()}},
        scalars={"iterations": np.asarray(step, "int64")},
        version=step,
        applied=[{"epoch": 0, "applied": [[0, step]], "skipped": []}],
    )


def write(disk: Memory, run: str = "run-1", plan: Plan = PLAN) -> None:
    """Two checkpoints, of which the second continues the first one's parts."""
    base = None
    for step, tables in itertools.islice(trained(), 2):
        states = [state_of(plan, shard, step, run) for shard in range(plan.shards)]
        base = write_checkpoint(ROOT, plan, tables, step, base, disk, run, states)


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Parses the same bytes once: half of the time of a variant, in which they come ten times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "from_json", lru_cache(50)(Manifest.from_json))
        for reader in (rows_reader, shard_reader):
            parse = reader.parse_safetensors_header
            patch.setattr(reader, "parse_safetensors_header", lru_cache(50)(parse))
        yield


@cache
def rows_at(step: int, shard: int, shards: int) -> Contents:
    """The rows that a shard has of the tables at a step."""
    tables = next(tables for at, tables in trained() if at == step)
    return rows_of(mine(tables, shard, shards))


@cache
def pristine() -> Files:
    """Two checkpoints of one run."""
    disk = Memory()
    write(disk)
    return disk.files


@cache
def foreign() -> list[Files]:
    """Checkpoints that resemble the newest: of another run at the same step, of more shards."""
    disks = [Memory(), Memory()]
    write(disks[0], "run-2")
    write(disks[1], plan=make_plan(VARIABLES, SHARDS + 1, "cut", TABLES))
    return [{p: d for p, d in disk.files.items() if p.parent == NEW} for disk in disks]


def one_of(rng: random.Random, files: Files, directory: Path) -> Path:
    return rng.choice(sorted(path for path in files if path.parent == directory))


def flip(rng: random.Random, files: Files, directory: Path) -> None:
    path = one_of(rng, files, directory)
    data = bytearray(files[path])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    files[path] = bytes(data)


def truncate(rng: random.Random, files: Files, directory: Path) -> None:
    path = one_of(rng, files, directory)
    files[path] = files[path][: rng.randrange(len(files[path]))]


def append(rng: random.Random, files: Files, directory: Path) -> None:
    path = one_of(rng, files, directory)
    files[path] += rng.choice([b"\n", b"\0", b"}", rng.randbytes(rng.randrange(1, 600))])


def zero(rng: random.Random, files: Files, directory: Path) -> None:
    """A block that never reached the disk, the last one as a crash leaves it."""
    path = one_of(rng, files, directory)
    data = bytearray(files[path])
    size = rng.randrange(1, len(data) + 1)
    start = rng.choice([len(data) - size, rng.randrange(len(data) - size + 1)])
    data[start : start + size] = bytes(size)
    files[path] = bytes(data)


def scramble(rng: random.Random, files: Files, directory: Path) -> None:
    """A block of something else, or of the same file."""
    path = one_of(rng, files, directory)
    data = bytearray(files[path])
    size = rng.randrange(1, min(512, len(data)))
    start, other = (rng.randrange(len(data) - size + 1) for _ in range(2))
    data[start : start + size] = rng.choice([rng.randbytes(size), data[other : other + size]])
    files[path] = bytes(data)


def repeat(rng: random.Random, files: Files, directory: Path) -> None:
    """A block that is there twice, or not at all."""
    path = one_of(rng, files, directory)
    data = files[path]
    start, stop = sorted(rng.sample(range(len(data) + 1), 2))
    files[path] = data[:stop] + data[start:] if rng.random() < 0.5 else data[:start] + data[stop:]


def swap(rng: random.Random, files: Files, directory: Path) -> None:
    """Two files exchanged: of two shards, of two checkpoints, of a shard and the manifest."""
    one, two = rng.sample(sorted(files), 2)
    files[one], files[two] = files[two], files[one]


def overwrite(rng: random.Random, files: Files, directory: Path) -> None:
    """A file in the place of another."""
    one, two = rng.sample(sorted(files), 2)
    files[one] = files[two]


def drop(rng: random.Random, files: Files, directory: Path) -> None:
    for _ in range(rng.randint(1, 2)):
        files.pop(one_of(rng, files, directory))


def rename(rng: random.Random, files: Files, directory: Path) -> None:
    """A file under another name, or the whole directory: also in the place of the other one."""
    if rng.random() < 0.5:
        path = one_of(rng, files, directory)
        files[path.with_name(rng.choice(["x", path.name + "~", "shard-9-of-9"]))] = files.pop(path)
        return
    target = rng.choice([OLD, ROOT / "step-00000030", ROOT / "step-00000020.g2", ROOT / "x"])
    for path in [path for path in files if path.parent == NEW]:
        files[target / path.name] = files.pop(path)


def exchange_directories(rng: random.Random, files: Files, directory: Path) -> None:
    names = [MANIFEST, *(shard_file_name(k, SHARDS) for k in range(SHARDS))]
    names += [rows_file_name(k, SHARDS, 0) for k in range(SHARDS)]
    for name in names:
        files[OLD / name], files[NEW / name] = files[NEW / name], files[OLD / name]


def mix(rng: random.Random, files: Files, directory: Path) -> None:
    """The manifest, or files, or both in part, of another checkpoint, run or plan."""
    if directory != NEW:
        return  # twice might make it whole
    older = {NEW / path.name: data for path, data in files.items() if path.parent == OLD}
    source = rng.choice([older, *foreign()])
    names = sorted(source)
    for path in rng.sample(names, rng.randint(1, len(names) - 1)):
        files[path] = source[path]


KINDS: list[Callable[[random.Random, Files, Path], None]] = [
    flip,
    truncate,
    append,
    zero,
    scramble,
    repeat,
    swap,
    overwrite,
    drop,
    rename,
    exchange_directories,
    mix,
]


def whole(files: Files, directory: Path) -> bool:
    """Whether ``directory`` is exactly what was written there."""
    return all(
        files.get(path) == data for path, data in pristine().items() if path.parent == directory
    )


def assert_state(found: ShardState, expected: ShardState) -> None:
    assert found.version == expected.version
    assert list(found.applied) == expected.applied
    for name, array in expected.values.items():
        np.testing.assert_array_equal(found.values[name], array)
        np.testing.assert_array_equal(
            found.elements["momentum"][name], expected.elements["momentum"][name]
        )


@cache
def looked(directory: Path, number: int, shard: int) -> set[Path]:
    """The files in which a shard of one of the plans looks for an undamaged checkpoint."""
    disk = Memory(pristine())
    load_state(directory, PLANS[number], shard, "run-1", disk)
    for _ in load_rows(directory, PLANS[number], shard, "run-1", disk):
        pass
    assert disk.looked <= pristine().keys()
    return disk.looked


def check(files: Files) -> str:
    """Asserts that only what was written is loaded; what came of it."""
    disk = Memory(files)
    damaged = {path for path, data in pristine().items() if files.get(path) != data}
    for directory, step in [(NEW, 20), (OLD, 10)]:
        for number, plan in enumerate(PLANS):
            for shard in range(plan.shards):
                if files != pristine() and not damaged & looked(directory, number, shard):
                    # It loads as it does undamaged.
                    assert plan is PLAN or whole(files, directory)
                    continue
                loaded = 0
                try:
                    state = load_state(directory, plan, shard, "run-1", disk)
                    assert_state(state, state_of(plan, shard, step, "run-1"))
                    loaded += 1
                except CheckpointError:
                    assert not whole(files, directory)
                try:
                    found = restored(load_rows(directory, plan, shard, "run-1", disk))
                    assert rows_of(found) == rows_at(step, shard, plan.shards)
                    loaded += 1
                except CheckpointError:
                    assert not whole(files, directory)
                # One shard's files may be whole while another's are not.
                assert loaded < 2 or plan is PLAN or whole(files, directory)
    try:
        choice = newest_good(ROOT, "run-1", storage=disk)
    except CheckpointError:
        assert not whole(files, NEW)
        assert not whole(files, OLD)
        return "none"
    assert whole(files, choice.directory)
    if choice.directory == NEW:
        return "newest"
    assert choice.directory == OLD
    assert not whole(files, NEW)
    passed_over = {path for path, _ in choice.refused}
    assert passed_over >= {path.parent for path in files} - {OLD}
    return "older"


def variant(kind: Callable[[random.Random, Files, Path], None], seed: int) -> Files:
    """A damaged copy; it is never what it was."""
    rng = random.Random(f"{kind.__name__}-{seed}")
    while True:
        files = dict(pristine())
        for directory in (NEW, OLD) if rng.random() < 0.1 else (NEW,):
            if any(path.parent == directory for path in files):
                kind(rng, files, directory)
        if files != pristine():
            return files


def run(kind: Callable[[random.Random, Files, Path], None], seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            check(variant(kind, seed))
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed}: {error!r}") from error


def test_an_undamaged_checkpoint_is_loaded() -> None:
    assert check(pristine()) == "newest"


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_loaded_in_silence(
    kind: Callable[[random.Random, Files, Path], None],
) -> None:
    run(kind, range(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_thousands_of_variants_is_loaded_in_silence(
    kind: Callable[[random.Random, Files, Path], None],
) -> None:
    run(kind, range(FAST, ALL))
