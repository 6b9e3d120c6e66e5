"""Checkpoints that someone has rewritten, checksums included: only what they say can give them
away."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from psrpc.checkpoint.manifest import MANIFEST, _sealed
from psrpc.checkpoint.safetensors_form import METADATA_KEY
from tests.psrpc.checkpoint.test_corruption import NEW, Files, pristine

Place = tuple[str | int, ...]
Change = Callable[[dict[str | int, Any], str | int], None]
"""Changes the entry of an object or array."""


DEEP = "@deep"
"""Stands for arrays within one another, more than any parser or copy takes."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, float("nan"), float("inf"), "", "x", "7"),
    *(10**9, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400, "9" * 5000),
    *([], {}, [[]], [None], [-1], [0, 0], [2**62], [0, 2**62, 2**62], {"x": 0}, {"": {}}),
    *("../x", "/etc/passwd", "a/b", "a\0b", "\ud800", "manifest.json", DEEP, [[[[[[]]]]]]),
)


def places(document: Any, here: Place = ()) -> Iterator[Place]:
    """Where the values of a JSON document are, its own place first."""
    yield here
    if isinstance(document, dict | list):
        entries = document.items() if isinstance(document, dict) else enumerate(document)
        for key, inner in entries:
            yield from places(inner, (*here, key))


def put(value: Any) -> Change:
    def change(outer: dict[str | int, Any], key: str | int) -> None:
        outer[key] = value

    return change


def drop(outer: dict[str | int, Any], key: str | int) -> None:
    del outer[key]


def add(outer: dict[str | int, Any], key: str | int) -> None:
    """One more: a key that is unknown, or an entry that is there already."""
    inner = outer[key]
    if isinstance(inner, dict):
        inner["more"] = 1
    elif isinstance(inner, list):
        inner.extend(copy.deepcopy(inner[:1]) or [0])
    else:
        outer[key] = [inner]


CHANGES: tuple[Change, ...] = (*map(put, VALUES), drop, add)


def forged(document: Any, place: Place, change: Change) -> Any:
    """A copy of a document that is changed in one place."""
    outer: Any = {"all": copy.deepcopy(document)}
    here, key = outer, "all"
    for step in place:
        here, key = here[key], step  # type: ignore[assignment]
    change(here, key)
    return outer.get("all")


@cache
def documents() -> dict[str, Any]:
    """The manifest of the newest checkpoint, and by name what stands in the header of each of the
    first shard's files: tensors, and our metadata under its key."""
    files = {path.name: data for path, data in pristine().items() if path.parent == NEW}
    found = {MANIFEST: json.loads(files.pop(MANIFEST))}
    for name, data in files.items():
        if "-0-of-" in name:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            header["__metadata__"] = json.loads(header["__metadata__"][METADATA_KEY])
            found[name] = header
    return found


def text_of(document: Any, **form: Any) -> str:
    deep = "[" * 100_000 + "]" * 100_000
    return json.dumps(document, **form).replace(f'"{DEEP}"', deep)


def sealed(document: Any) -> bytes:
    """A manifest whose checksum is that of its text."""
    if isinstance(document, dict):
        document = {k: v for k, v in document.items() if k != "sha256"}
    return _sealed(text_of(document, indent=1).removesuffix("\n}").encode())


def checkpoint(name: str, document: Any) -> Files:
    """Two checkpoints, in the newest of which ``name`` says what ``document`` does; sizes and
    checksums are as they should be."""
    files = dict(pristine())
    if name == MANIFEST:
        return files | {NEW / MANIFEST: sealed(document)}
    old = files[NEW / name]
    if isinstance(document, dict) and "__metadata__" in document:
        text = text_of(document["__metadata__"])
        document = document | {"__metadata__": {METADATA_KEY: text}}
    header = text_of(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    new = len(header).to_bytes(8, "little") + header + old[8 + int.from_bytes(old[:8], "little") :]
    manifest = copy.deepcopy(documents()[MANIFEST])
    for shard in manifest["files"]:
        for entry in (shard, *shard.get("rows", ())):
            if entry["name"] == name:
                entry |= {"nbytes": len(new), "sha256": sha256(new).hexdigest()}
    return files | {NEW / name: new, NEW / MANIFEST: sealed(manifest)}


def forgeries(seed: int | None = None) -> Iterator[tuple[str, Files]]:
    """Every change in every place, or with ``seed`` one of them in each; and what it is, in
    words."""
    for name, document in documents().items():
        for place in places(document):
            picked = CHANGES
            if seed is not None:
                picked = (random.Random(f"{seed}-{name}-{place}").choice(CHANGES),)
            for change in picked:
                what = f"{name} {place} {CHANGES.index(change)}"
                if change is drop and not place:
                    continue
                yield what, checkpoint(name, forged(document, place, change))


def on_disk(files: Files, root: Path) -> None:
    """Writes them below ``root``."""
    for path, data in files.items():
        there = root / path.relative_to("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data)
