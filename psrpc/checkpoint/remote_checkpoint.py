"""A checkpoint that a URL names: those of its files that are wanted, copied here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from psrpc.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from psrpc.core.errors import CheckpointError, InvalidData, PsError
from psrpc.files.remote import find_in
from psrpc.files.remote_copies import copied_here


def dense_files(manifest: Manifest) -> list[str]:
    """The files of a checkpoint that have the variables that are no tables."""
    return [file.name for file in manifest.files]


def row_files(manifest: Manifest) -> list[str]:
    """The files of a checkpoint that have the rows of its tables."""
    return [entry.name for file in manifest.files for entry in file.rows]


@contextmanager
def checkpoint_here(
    url: str, wanted: Callable[[Manifest], Iterable[str]] = lambda _manifest: ()
) -> Iterator[Path]:
    """A directory, for as long as the context lasts, with the manifest of a checkpoint and what is
    ``wanted`` of its files.

    Raises:
        CheckpointError: there is no checkpoint, or it lacks one of these files; and what the body
            raises of the copies is said of the URL.
        InvalidData: they cannot be read, or there is no room for them here.
    """
    if "::" in url:
        # Shards are told it by a worker: the fewer kinds of file systems they open, the better.
        raise InvalidData(f"{url}: copies are made of what a URL names by itself; leave the :: out")
    there = find_in(url)
    if MANIFEST not in there:
        raise CheckpointError(f"{url} has no {MANIFEST}: it is not a checkpoint", code="PS404")
    with copied_here(url, {MANIFEST: there[MANIFEST]}) as head, _named(head, url):
        names = [MANIFEST, *wanted(read_manifest(head))]
        for name in names:
            if name not in there:
                raise CheckpointError(f"{url} has no file {name}, which its {MANIFEST} names")
        with copied_here(url, {name: there[name] for name in names}) as folder, _named(folder, url):
            yield folder


@contextmanager
def _named(folder: Path, url: str) -> Iterator[None]:
    """Says the URL where an error says the place of its copy."""
    try:
        yield
    except PsError as error:
        if str(folder) not in str(error):
            raise
        text = str(error).replace(str(folder), url.rstrip("/"))
        raise type(error)(text, code=error.code) from None
