"""A slice on a thread of a worker: what its end means."""

from __future__ import annotations

import pytest

from pserver.process.config import ServeConfig
from pserver.process.hosted import HostedSlice
from psrpc.core.errors import (
    AlreadyExists,
    InvalidJob,
    JobFailed,
    PsError,
    RemoteFailure,
    StaleGeneration,
)

WAIT_S = 20.0
"""Longer than anything takes that goes well."""


@pytest.mark.parametrize(
    ("error", "ends_with"),
    [
        (InvalidJob("not this run"), InvalidJob),
        (OSError("no port"), RemoteFailure),
        (AlreadyExists("it is held"), None),
        (StaleGeneration("it was taken over"), None),
        (JobFailed("no space"), None),
    ],
    ids=str,
)
def test_a_slice_that_fails_says_so_and_one_that_is_replaced_does_not(
    error: Exception, ends_with: type[PsError] | None
) -> None:
    ended: list[HostedSlice] = []

    def serves(*_arguments: object) -> None:
        raise error

    slice_ = HostedSlice(ServeConfig(shard=3), 7, ended.append, serves=serves)
    assert slice_.join(WAIT_S)
    assert ended == [slice_]
    assert slice_.transport(1, "") is None
    if ends_with is None:
        assert slice_.error is None
    else:
        assert isinstance(slice_.error, ends_with)
        assert str(error) in str(slice_.error)
