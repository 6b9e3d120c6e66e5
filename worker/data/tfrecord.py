"""Records of TFRecord files, read by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData
from worker.data.files import (
    DataFile,
    Found,
    IndexedSource,
    RecordIndex,
    existing_files,
    hash_files,
)
from worker.data.source import Batch, check_count

# A record in the file: uint64 length, uint32 checksum of the length, data, uint32 checksum of
# the data, all little-endian (tensorflow/core/lib/io/record_writer.h).
_HEADER_NBYTES = 12
_FOOTER_NBYTES = 4


class TfRecords(IndexedSource[RecordIndex]):
    """Records of TFRecord files, uncompressed.

    On first use an index of the files is built (16 bytes of memory per record), so that the order
    shuffles single records over all files. It checks the checksums of the records' lengths, not
    those of the data.

    Args:
        files: a path, a pattern such as ``data/train-*.tfrecord``, or a list of them. A pattern
            takes files in the order of their names. URLs such as ``s3://bucket/train-*.tfrecord``
            are read in place, see docs/urls.md.
        parse: turns one serialized record, a scalar string tensor, into ``(x, y)`` or ``(x, y,
            sample_weight)`` tensors, say with ``tf.io.parse_single_example``. TensorFlow compiles
            it, so it must consist of TensorFlow operations. A sparse tensor, as
            ``tf.io.VarLenFeature`` gives it, becomes a row of a ragged one.
        batched: whether ``parse`` turns many serialized records ``[n]`` into a batch instead, say
            with ``tf.io.parse_example``, which is faster. Sparse tensors become ragged here too;
            ``tf.io.RaggedFeature`` works as well.

    Raises:
        InvalidJob: on first use: a file does not exist, is damaged or no TFRecord file; on
            reading: the dense tensors of records have different lengths.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        parse: Callable[[Any], Any],
        *,
        batched: bool = False,
    ) -> None:
        super().__init__()
        self._files = [files] if isinstance(files, str | Path) else list(files)
        self._parse = parse
        self._batched = batched
        self._parse_batch: Callable[[list[bytes]], Batch] | None = None

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns the name, for messages, of the record at a position of an epoch."""
        return f"record {self._opened().order.records_at(seed, epoch, position, position + 1)[0]}"

    def fingerprint(self) -> str:
        return hash_files(self._found())

    def close(self) -> None:
        super().close()
        with self._lock:
            self._parse_batch = None

    def _found(self) -> list[Found]:
        return existing_files("TfRecords", self._files)

    def _open(self) -> RecordIndex:
        index = RecordIndex(self._found())
        spans = [np.empty((0, 3), np.int64)]
        try:
            for number, file in enumerate(index.files.files):
                located = _scan(file)
                spans.append(np.column_stack([np.full(len(located), number), located]))
        except BaseException:
            index.files.close()
            raise
        index.located(np.concatenate(spans))
        return index

    def _batch(self, index: RecordIndex, records: npt.NDArray[np.int64]) -> Batch:
        serialized = index.read(records)
        with self._lock:
            if self._parse_batch is None:
                parse = self._parse if self._batched else _of_each(self._parse)
                self._parse_batch = _compiled(parse)
            parse_batch = self._parse_batch
        return check_count("parse", parse_batch(serialized), len(records))


def _compiled(parse: Callable[[Any], Any]) -> Callable[[list[bytes]], Batch]:
    """Compiles ``parse`` of many records ``[n]`` to run on the CPU."""
    import tensorflow as tf

    function = tf.function(parse, input_signature=[tf.TensorSpec([None], tf.string)])

    def run(serialized: list[bytes]) -> Batch:
        try:
            with tf.device("CPU:0"):
                parsed: Batch = function(tf.constant(serialized, tf.string))
        except tf.errors.InvalidArgumentError as error:
            if "TensorListStack" not in str(error):
                raise
            raise InvalidData(
                "parse gave records whose tensors have different lengths; let it give sparse ones "
                "(tf.io.VarLenFeature), or parse many records at once (batched=True)"
            ) from None
        return parsed

    return run


def _of_each(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turns ``parse`` of one record into a function of many ``[n]``."""
    import tensorflow as tf

    def dense(tensor: Any) -> Any:
        """Returns the values of a sparse tensor, as a row of a ragged one."""
        if not isinstance(tensor, tf.SparseTensor):
            return tensor
        # The position of a value in its row would be lost.
        filled = tf.range(tf.size(tensor.values, tf.int64))[:, tf.newaxis]
        whole = tf.debugging.assert_equal(
            tensor.indices, filled, "parse gave a sparse tensor that is not filled from its start"
        )
        with tf.control_dependencies([whole]):
            return tf.identity(tensor.values)

    def stacked(tensor: Any) -> tf.TypeSpec:
        if isinstance(tensor, tf.SparseTensor):
            return tf.RaggedTensorSpec([None], tensor.dtype, ragged_rank=0)
        return tf.type_spec_from_value(tensor)

    scalar = tf.function(parse, input_signature=[tf.TensorSpec([], tf.string)])
    signature = tf.nest.map_structure(stacked, scalar.get_concrete_function().structured_outputs)

    def parse_all(serialized: Any) -> Any:
        return tf.map_fn(
            lambda record: tf.nest.map_structure(dense, parse(record)),
            serialized,
            fn_output_signature=signature,
        )

    return parse_all


def _scan(file: DataFile) -> npt.NDArray[np.int64]:
    """Returns ``[records, 2]``: offset and length of the data of each record."""
    spans: list[tuple[int, int]] = []
    headers: list[bytes] = []
    read = file.scan()
    at = 0
    while at < file.nbytes:
        header = read(at, _HEADER_NBYTES)
        length = int.from_bytes(header[:8], "little")
        stop = at + _HEADER_NBYTES + length + _FOOTER_NBYTES
        if len(header) < _HEADER_NBYTES or stop > file.nbytes:
            break
        spans.append((at + _HEADER_NBYTES, length))
        headers.append(header)
        at = stop
    table = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER_NBYTES)
    wrong = np.flatnonzero(masked_crc32c(table[:, :8]) != table[:, 8:].copy().view("<u4")[:, 0])
    if len(wrong):
        first = int(wrong[0])
        at = spans[first][0] - _HEADER_NBYTES
        raise InvalidData(
            f"TfRecords: {file.name!r} is damaged at byte {at}, record {first}: the checksum of "
            "its length is wrong; compressed files are not supported"
        )
    if at < file.nbytes:
        raise InvalidData(
            f"TfRecords: {file.name!r} ends inside record {len(spans)}, which begins at byte {at}; "
            "it is cut short, compressed or no TFRecord file"
        )
    return np.array(spans, np.int64).reshape(-1, 2)


def masked_crc32c(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Returns ``[n]``: CRC-32C (Castagnoli, RFC 3720 appendix B.4) of each row ``[n, nbytes]``,
    masked as in TFRecord files (tensorflow/core/lib/hash/crc32c.h)."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = _CRC_TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _crc_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table


_CRC_TABLE = _crc_table()
