"""A disk that forgets, at a power cut, what was not synced; and fails before that, at times."""

from __future__ import annotations

import errno
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from random import Random

from coordinator.checkpoints.disk import DiskChoice, DiskWork, Result
from coordinator.core.run import Run
from psrpc.files.storage import Written
from tests.sim.faults import Faults
from tests.sim.schedule import Crash, Process

FULL_S = (0.05, 8.0)
"""How long the disk stays full, in seconds."""


class File:
    """``lasts`` once its bytes were synced; ``rotten`` once some have changed by themselves. It may
    have several names."""

    def __init__(self, writer: str) -> None:
        self.data = b""
        self.lasts = False
        self.rotten = False
        self.writer = writer


class Directory:
    """Names, as they are and as they would be after a power cut."""

    def __init__(self) -> None:
        self.names: dict[str, File | Directory] = {}
        self.lasting: dict[str, File | Directory] = {}
        self._changes: list[tuple[str, dict[str, File | Directory | None]]] = []
        self._forsaken: list[tuple[str, dict[str, File | Directory | None]]] = []

    def change(self, writer: str, change: dict[str, File | Directory | None]) -> None:
        """Names appear, and disappear where None; all of them or none outlive a power cut. What a
        sync has failed for is written anew with whatever changes the same names after it."""
        touched = set(change)
        while again := [item for item in self._forsaken if touched & item[1].keys()]:
            self._forsaken = [item for item in self._forsaken if item not in again]
            self._changes += again
            touched.update(*(names for _, names in again))
        self._changes.append((writer, change))
        _apply(self.names, change)

    def sync(self) -> None:
        """Makes changes last, except those that a sync has failed for."""
        for _, change in self._changes:
            _apply(self.lasting, change)
        self._changes.clear()

    def fail_to_sync(self) -> None:
        """The system takes what was changed for written from now on, and it is not."""
        self._forsaken += self._changes
        self._changes.clear()

    def lose(self, writers: set[str], random: Random) -> bool:
        """The machines of ``writers`` lose power: their changes from some moment on are gone, and
        so are the bytes that were not synced. Whether anything was lost."""
        mine = sum(writer in writers for writer, _ in self._changes)
        left = random.randint(0, mine) if mine else 0
        lost = left < mine
        kept = [item for item in self._forsaken if item[0] not in writers]
        lost |= len(kept) < len(self._forsaken)
        self._forsaken = list(kept)
        for writer, change in self._changes:
            if writer in writers:
                left -= 1
                if left < 0:
                    continue
            kept.append((writer, change))
        self.names = dict(self.lasting)
        for _, change in kept:
            _apply(self.names, change)
        self._changes = kept[len(self._forsaken) :]
        for node in self.names.values():
            if isinstance(node, Directory):
                lost |= node.lose(writers, random)
            elif not node.lasts and node.writer in writers:
                # Its length may have lasted, and its blocks not.
                cut = random.randint(0, len(node.data))
                hole = random.choice((b"", bytes(len(node.data) - cut)))
                node.data, node.lasts, lost = node.data[:cut] + hole, True, True
        return lost


class Disk:
    """The storage that all processes share. Paths are absolute."""

    def __init__(self, random: Random, faults: Faults) -> None:
        self.random = random
        self.faults = faults
        self.root = Directory()
        self.full_until = -1.0

    def lose(self, writers: set[str]) -> None:
        """The machines of these processes lose power."""
        if self.root.lose(writers, self.random):
            self.faults.fired["writes lost"] += 1

    def rot(self, checkpoints: PurePath) -> int:
        """A bit flips in a file of the newest checkpoint, and so in all others that it is linked
        into, if there is another one that stays good; in how many it did."""
        try:
            names = self.directory(checkpoints).names
        except OSError:
            return 0
        held = []
        for name in sorted((name for name in names if not name.startswith(".")), key=_age):
            directory = names[name]
            assert isinstance(directory, Directory)
            held.append([file for _, file in sorted(directory.names.items())])
        if not held or _rotten(held[-1]):
            return 0
        file = self.random.choice(held[-1])
        assert isinstance(file, File)
        with_it = [files for files in held if file in files]
        # What a job can go on from then is the one before those that have it.
        before = held[: -len(with_it)]
        if not before or _rotten(before[-1]):
            return 0
        file.rotten = True
        at = self.random.randrange(len(file.data))
        flipped = file.data[at] ^ 1 << self.random.randrange(8)
        file.data = file.data[:at] + bytes([flipped]) + file.data[at + 1 :]
        return len(with_it)

    def lacking(self, path: PurePath) -> str:
        """Describes what a power cut would take from a directory; empty if nothing."""
        node: File | Directory | None = self.root
        for name in path.parts[1:]:
            assert isinstance(node, Directory)
            node = node.lasting.get(name)
            if node is None:
                return f"the name {name!r}"
        assert isinstance(node, Directory)
        if node.lasting.keys() != node.names.keys():
            return f"names in {path.name}: {sorted(node.names.keys() - node.lasting.keys())}"
        torn = [n for n, file in node.names.items() if isinstance(file, File) and not file.lasts]
        return f"the bytes of {', '.join(torn)}" if torn else ""

    def find(self, path: PurePath) -> File | Directory:
        """The file or directory at a path. Raises FileNotFoundError."""
        node: File | Directory = self.root
        for name in path.parts[1:]:
            found = node.names.get(name) if isinstance(node, Directory) else None
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = found
        return node

    def directory(self, path: PurePath) -> Directory:
        """The directory at a path. Raises OSError."""
        node = self.find(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return node


class View:
    """The disk as one process uses it: a :class:`psrpc.files.storage.Storage`."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process

    def make_directory(self, path: Path) -> None:
        above = self._disk.directory(path.parent)
        if path.name in above.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._strike("make", path)
        above.change(self._writer, {path.name: Directory()})
        self._crash()

    def is_empty(self, path: Path) -> bool:
        try:
            return not self._disk.directory(path).names
        except FileNotFoundError:
            return True

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        directory = self._disk.directory(path.parent)
        if path.name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        data = b"".join(bytes(part) for part in parts)
        file = File(self._writer)
        directory.change(self._writer, {path.name: file})
        file.data = data[: len(data) // 2]
        self._strike("write", path)
        file.data = data
        self._crash()
        if self._disk.faults.strikes("EIO"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        file.lasts = True
        return Written(len(data), hashlib.sha256(data).hexdigest())

    def link(self, old: Path, new: Path) -> None:
        file, directory = self._disk.find(old), self._disk.directory(new.parent)
        assert isinstance(file, File)
        if new.name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(new))
        self._strike("link", new)
        directory.change(self._writer, {new.name: file})
        self._crash()

    def sync(self, directory: Path) -> None:
        found = self._disk.directory(directory)
        self._crash()
        if self._disk.faults.strikes("EIO"):
            found.fail_to_sync()
            raise OSError(errno.EIO, "Input/output error", str(directory))
        found.sync()
        self._crash()

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "across directories it would be two changes"
        node, parent = self._disk.directory(old), self._disk.directory(new.parent)
        there = parent.names.get(new.name)
        if isinstance(there, File) or (there is not None and there.names):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(new))
        self._strike("rename", new)
        parent.change(self._writer, {old.name: None, new.name: node})
        self._crash()

    def remove(self, directory: Path) -> None:
        found = self._disk.directory(directory)
        for name, node in list(found.names.items()):
            self._crash()
            if isinstance(node, Directory):
                self.remove(directory / name)
            else:
                found.change(self._writer, {name: None})
        self._disk.directory(directory.parent).change(self._writer, {directory.name: None})

    def remove_empty(self, directory: Path) -> None:
        if self._disk.directory(directory).names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(directory))
        self._disk.directory(directory.parent).change(self._writer, {directory.name: None})

    def open(self, path: Path) -> io.BufferedIOBase:
        node = self._disk.find(path)
        if isinstance(node, Directory):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return io.BytesIO(node.data)

    def directories(self, path: Path) -> list[str]:
        try:
            names = self._disk.directory(path).names
        except FileNotFoundError:
            return []
        return sorted(name for name, node in names.items() if isinstance(node, Directory))

    def free(self, path: Path) -> int:
        return 0 if self._full else 1 << 40

    @property
    def _writer(self) -> str:
        return self._process.name

    @property
    def _full(self) -> bool:
        return self._process.schedule.now() < self._disk.full_until

    def _crash(self) -> None:
        if self._disk.faults.strikes("crash at the disk"):
            if self._disk.random.random() < 0.5:
                self._disk.lose({self._writer})
            raise Crash

    def _strike(self, what: str, path: Path) -> None:
        self._process.schedule.trace(self._process, what, path)
        self._crash()
        faults = self._disk.faults
        if faults.strikes("EIO"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        if faults.strikes("ENOSPC"):
            self._disk.full_until = self._process.schedule.now() + faults.between(*FULL_S)
        if self._full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


def _age(checkpoint: str) -> tuple[int, int, int, str]:
    """Checkpoints are ordered by generation, then by step, then by how often that was tried; a
    changed copy comes after its original."""
    named = re.fullmatch(r"step-(\d+)(?:\.g(\d+))?(?:\.r(\d+))?(\.set.*)?", checkpoint)
    assert named, checkpoint
    step, generation, tries, copy = named.groups(default="0")
    return max(1, int(generation)), int(step), int(tries), copy


def _rotten(files: Iterable[File | Directory]) -> bool:
    return any(isinstance(file, File) and file.rotten for file in files)


def _apply(names: dict[str, File | Directory], change: dict[str, File | Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


DISK_S = (0.001, 0.5)
"""How long a piece of work on the disk takes."""


class SlowDisk(DiskWork):
    """Takes simulated time."""

    def __init__(self, process: Process, storage: View, run: Run, counts: Counter[str]) -> None:
        super().__init__(run, storage)
        self._process = process
        self._counts = counts

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        schedule = self._process.schedule

        def end() -> None:
            done(work())
            self.over()

        schedule.after(schedule.random.uniform(*DISK_S), self._process, end)

    def choose(self, refused: Mapping[str, str], done: Callable[[DiskChoice], None]) -> None:
        """See :class:`coordinator.checkpoints.disk.DiskWork`. Counts how often it is not the
        newest."""

        def chosen(choice: DiskChoice) -> None:
            if choice.chosen is not None and choice.chosen.remarks:
                self._counts["fall-backs"] += 1
            done(choice)

        super().choose(refused, chosen)
