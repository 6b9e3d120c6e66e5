"""Records that a function makes, as arrays or as ``tf.data`` pipelines."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.permutation import BlockOrder
from worker.data.ragged import in_numpy, take
from worker.data.source import (
    Batch,
    arrays_of,
    check_count,
    check_range,
    join_batches,
    map_arrays,
)

KEPT_BLOCKS = 3
"""Shuffled blocks in memory: the current one, and two that a batch may reach into."""


class Function:
    """Records ``[start, stop)`` from ``make(start, stop)``: a batch of them, ``(x, y)`` or ``(x, y,
    sample_weight)`` in NumPy's arrays, or a ``tf.data.Dataset``.

    The dataset yields single records, in order and unbatched. The source calls ``make`` for blocks
    of ``block_records`` records in a seeded order and shuffles each in memory, where it keeps up to
    three. It refuses a dataset that shuffles: each call would give other records for a block, and
    training would miss some.

    Rows of different lengths are a ``worker.Ragged``, or sparse or ragged tensors of a dataset.
    Turn a dataset of dense tensors of different lengths into a batch:
    ``next(iter(dataset.ragged_batch(stop - start)))``.

    Args:
        make: the function; may be called several times for a block.
        num_records: the total number of records.
        block_records: records of a block. Larger shuffles better and needs more memory.
        content: optional version of the records; a run does not resume with another one.

    Raises:
        InvalidJob: the function makes fewer or more records than requested, or a dataset that
            batches or shuffles.
    """

    def __init__(
        self,
        make: Callable[[int, int], Any],
        num_records: int,
        *,
        block_records: int = 4096,
        content: str = "",
    ) -> None:
        for name, value in (("num_records", num_records), ("block_records", block_records)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidData(f"Function: {name} is {value!r}; expected a whole number")
        if not block_records:
            raise InvalidData("Function: block_records is 0; expected at least 1")
        self._make = make
        self._records = num_records
        self._block_records = block_records
        self._content = content
        self._order = BlockOrder(num_records, block_records)
        # Held while making a block, so that two threads do not make the same one.
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[int, int, int], Batch] = OrderedDict()

    @property
    def num_records(self) -> int:
        return self._records

    def read(self, seed: int, batch: BatchId) -> Batch:
        stop = batch.first + batch.count
        check_range("Function", batch.first, stop, self._records)
        pieces = []
        for block, low, high in self._order.pieces(seed, batch.epoch, batch.first, stop):
            pieces.append(_part(self._block(seed, batch.epoch, block), low, high))
        return join_batches(pieces)

    def read_range(self, start: int, stop: int) -> Batch:
        check_range("Function", start, stop, self._records)
        return self._made(start, stop)

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns the name, for messages, of the record at a position of an epoch."""
        [(block, low, _)] = self._order.pieces(seed, epoch, position, position + 1)
        start, _ = self._order.range_of(block)
        return f"record {start + self._order.shuffled(seed, epoch, block)[low]}"

    def fingerprint(self) -> str:
        """Hashes the sizes and ``content``, not the records: augmentation may change them per
        call."""
        text = f"{self._records} {self._block_records}"
        if self._content:
            text += f" {self._content}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()

    def _block(self, seed: int, epoch: int, block: int) -> Batch:
        key = (seed, epoch, block)
        with self._lock:
            if key not in self._blocks:
                places = self._order.shuffled(*key)
                self._blocks[key] = map_arrays(
                    lambda a: take(a, places), self._made(*self._order.range_of(block))
                )
                while len(self._blocks) > KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            return self._blocks[key]

    def _made(self, start: int, stop: int) -> Batch:
        """Returns records ``[start, stop)`` as one batch; takes one more from a dataset to detect a
        surplus."""
        name = f"the dataset of records [{start}, {stop})"
        dataset = self._make(start, stop)
        if isinstance(dataset, tuple):
            name = f"the function of records [{start}, {stop})"
            return check_count(name, dataset, stop - start)
        if not hasattr(dataset, "element_spec"):
            raise InvalidData(
                f"{name} is {type(dataset).__name__}; expected a tf.data.Dataset or (x, y)"
            )
        wanted = stop - start
        if "shuffle" in dataset_steps(dataset):
            raise InvalidData(
                f"{name} is shuffled; leave .shuffle(...) out: Function shuffles the records "
                "itself, each epoch anew, and needs record i to be the same each time"
            )
        # Batching in TensorFlow is 30 times faster than record by record in Python. One record
        # more than requested shows a dataset that gives too many, also an endless one.
        try:
            batches = list(dataset.take(wanted + 1).batch(wanted + 1))
        except Exception as error:  # TensorFlow's; this module does not import it
            if not re.search("Cannot (batch tensors|add tensor to the batch)", str(error)):
                raise
            _check_unbatched(name, dataset, wanted)
            raise InvalidData(
                f"{name} has tensors of different lengths; return "
                "next(iter(dataset.ragged_batch(stop - start))) instead"
            ) from None
        if not batches:
            raise InvalidData(f"{name} gave 0 records; it was asked for {wanted}")
        made = len(in_numpy(next(arrays_of(batches[0]))))
        if made > wanted:
            raise InvalidData(
                f"{name} gave more than {counted(wanted, 'record')}, which it was asked for; "
                "it must end there: leave .repeat() out, or add .take(stop - start)"
            )
        if made < wanted:
            _check_unbatched(name, dataset, wanted)
        return check_count(name, batches[0], wanted)


_STEPS = {
    "_BatchDataset": "batch",
    "_ParallelBatchDataset": "batch",
    "_PaddedBatchDataset": "batch",
    "_ShuffleDataset": "shuffle",
}
"""The steps of TensorFlow's private dataset classes. A renamed class only makes an error less
exact."""


def dataset_steps(dataset: Any) -> list[str]:
    """Returns the steps "batch" and "shuffle" that a ``tf.data.Dataset`` is built from."""
    steps, todo = [], [dataset]
    while todo:
        each = todo.pop()
        steps += [_STEPS[name] for name in [type(each).__name__] if name in _STEPS]
        todo += getattr(each, "_inputs", list)()
    return steps


def _check_unbatched(name: str, dataset: Any, wanted: int) -> None:
    """Refuses elements that are batches, judged by the dataset's steps or its elements."""
    elements = list(dataset.take(wanted + 1))
    firsts = [next(arrays_of(element)) for element in elements]
    records = sum(int(first.shape[0]) for first in firsts if first.shape.rank)
    if "batch" in dataset_steps(dataset) or records == wanted > len(firsts):
        raise InvalidData(
            f"{name} gave {counted(len(elements), 'batch', 'batches')}, and was asked for "
            f"{counted(wanted, 'record')}; leave .batch(...) out, or end with .unbatch(): "
            "workers make batches of the job's batch_size themselves"
        )


def _part(batch: Batch, low: int, high: int) -> Batch:
    part: Batch = map_arrays(lambda array: array[low:high], batch)
    return part
