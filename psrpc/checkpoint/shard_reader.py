"""Reads one shard's file of a checkpoint in one pass, and verifies it in the same pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from psrpc.checkpoint.safetensors_form import Placed, header_length, parse_safetensors_header
from psrpc.checkpoint.shard_file import FORMAT, Entry, NDArray, ShardHeader
from psrpc.core.document import record, whole
from psrpc.core.errors import CheckpointError
from psrpc.files.storage import DISK, Storage

_CHUNK = 1 << 20
"""Bytes per step of the digest: few enough that they are still in the CPU cache."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: ``size`` elements of ``dtype`` in ``shape``."""

    name: str
    entry: Entry
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class ShardReader:
    """An open file, and a context manager.

    Iterate over its tensors, and call :meth:`fill` or :meth:`read` for a needed tensor before the
    next one. Do not use any values before the iteration has ended, since only then has the whole
    file been compared with its size and digest."""

    def __init__(self, path: Path, nbytes: int, sha256: str, storage: Storage = DISK) -> None:
        """Opens the file and reads its header. ``nbytes`` and ``sha256`` are those in the manifest.

        Raises:
            CheckpointError: the file is missing, has another size, or is not of this format.
        """
        self.path = path
        self._sha256 = sha256
        self._digest = hashlib.sha256()
        self._left = 0
        """Number of unread bytes of the current tensor."""
        try:
            self._file = storage.open(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            found = self._file.seek(0, 2)
            self._file.seek(0)
            if found != nbytes:
                raise CheckpointError(f"{path} has {found} bytes; expected {nbytes}")
            self.header, self.tensors = self._read_header(nbytes)
        except OSError as error:
            self._file.close()
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the tensors in the order of the file.

        Raises:
            CheckpointError: at the end, when the file is not as the manifest says.
        """
        for tensor in self.tensors:
            self._left = tensor.size * np.dtype(tensor.dtype).itemsize
            yield tensor
            self._skip(self._left)
        digest = self._digest.hexdigest()
        if digest != self._sha256:
            raise CheckpointError(f"{self.path} has SHA-256 {digest}; expected {self._sha256}")

    def fill(self, tensor: Tensor, array: NDArray, first: int = 0) -> None:
        """Reads elements ``[first, first + len(array))`` of the current tensor into ``array``,
        which is flat and contiguous. Call it at most once for each tensor.

        Raises:
            CheckpointError: the elements have another dtype, or the tensor has fewer.
        """
        if array.dtype.name != tensor.dtype or first + array.size > tensor.size:
            raise CheckpointError(
                f"{self.path} holds {tensor.name!r} as {tensor.dtype}[{tensor.size}]; expected "
                f"{array.dtype.name}, and elements {first}..{first + array.size}"
            )
        self._skip(first * array.itemsize)
        if array.size:
            self._read_into(array.view(np.uint8).data)

    def read(self, tensor: Tensor) -> NDArray:
        """Reads the current tensor into a new array."""
        array = np.empty(tensor.size, tensor.dtype)
        self.fill(tensor, array)
        return array.reshape(tensor.shape)

    def _read_header(self, nbytes: int) -> tuple[ShardHeader, list[Tensor]]:
        try:
            length = header_length(self._take(min(8, nbytes)), nbytes)
            header, placed = parse_safetensors_header(self._take(length), nbytes - 8 - length)
            _FORMAT(header, "its header")
            if header["format"] != FORMAT:
                raise CheckpointError(
                    f"{self.path} has format {header['format']}; this version reads {FORMAT}",
                    code="PS403",
                )
            found = ShardHeader.from_json(header)
            return found, _tensors(placed, found.entries)
        except ValueError as error:
            raise CheckpointError(f"{self.path} is not a shard's file: {error}") from error

    def _take(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._left = count
        self._read_into(memoryview(buffer))
        return bytes(buffer)

    def _read_into(self, view: memoryview) -> None:
        self._left -= len(view)
        while view:
            try:
                count = self._file.readinto(view[:_CHUNK])
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{self.path} ends too soon")
            self._digest.update(view[:count])
            view = view[count:]

    def _skip(self, count: int) -> None:
        buffer = memoryview(bytearray(min(count, _CHUNK)))
        while count:
            piece = buffer[: min(count, _CHUNK)]
            self._read_into(piece)
            count -= len(piece)


_FORMAT = record({"format": whole()}, more=True)


def _tensors(placed: Sequence[Placed], entries: Mapping[str, Entry]) -> list[Tensor]:
    """Returns the tensors with their descriptions. Raises ValueError."""
    if entries.keys() != {tensor.name for tensor in placed}:
        raise ValueError(f"it has {len(placed)} tensors, and entries of others")
    found = []
    for tensor in placed:
        name, entry = tensor.name, entries[tensor.name]
        elements = entry["stop"] - entry["start"]
        if tensor.size != elements or (entry["kind"] == "whole" and entry["start"]):
            raise ValueError(f"tensor {name!r} has {tensor.size} elements, and its entry others")
        found.append(Tensor(name, entry, tensor.dtype, tensor.shape))
    return found
