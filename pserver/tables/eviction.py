"""Which rows make room for others."""

from __future__ import annotations

import numpy as np

from pserver.tables.hash_index import Slots
from pserver.tables.id_store import IdStore
from psrpc.core.tables import Eviction, mix

_NEVER = np.uint64(2**64 - 1)


def victims(store: IdStore, eviction: Eviction, rows: int, spared: Slots) -> Slots:
    """The slots of ``rows`` rows to evict; none of ``spared``, distinct slots, is among them.

    ``age``: those touched longest ago, of these the ones with the least count; ``frequency``: those
    with the least count, of these the ones touched longest ago. Beyond that the hash of the id
    decides, so that the choice depends on what the table holds and not on how it came there.
    There must be that many.
    """
    touched = store.touched.rows()[: store.used]
    counts = store.counts.rows()[: store.used]
    first, second = (touched, counts) if eviction == "age" else (counts, touched)
    keys = first.astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= second
    keys[touched == 0] = _NEVER
    keys[spared] = _NEVER
    highest = np.partition(keys, rows - 1)[rows - 1]
    assert highest != _NEVER, "more rows are to be evicted than there are"
    sure = np.flatnonzero(keys < highest)
    ties = np.flatnonzero(keys == highest)
    needed = rows - len(sure)
    if needed < len(ties):
        hashes = mix(store.ids.rows()[ties])
        ties = ties[np.argpartition(hashes, needed - 1)[:needed]]
    return np.concatenate([sure, ties])
