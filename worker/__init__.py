"""The worker. A job file may import from here what :mod:`pserver` names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pserver import (
        Arrays as Arrays,
    )
    from pserver import (
        Batch as Batch,
    )
    from pserver import (
        Csv as Csv,
    )
    from pserver import (
        DataSource as DataSource,
    )
    from pserver import (
        Embedding as Embedding,
    )
    from pserver import (
        Function as Function,
    )
    from pserver import (
        Job as Job,
    )
    from pserver import (
        Npz as Npz,
    )
    from pserver import (
        Ragged as Ragged,
    )
    from pserver import (
        RowwiseAdagrad as RowwiseAdagrad,
    )
    from pserver import (
        TfRecords as TfRecords,
    )
    from pserver import (
        setting as setting,
    )
    from pserver import (
        string_ids as string_ids,
    )


def __getattr__(name: str) -> object:
    users = import_module("pserver")
    if name not in users.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(users, name)
