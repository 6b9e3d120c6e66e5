"""Requests to the host are lines that come back as they were."""

from __future__ import annotations

import pytest

from psrpc.ops.host_requests import (
    HostRequest,
    PartsRequest,
    UpRequest,
    decode_request,
    encode_request,
)


@pytest.mark.parametrize(
    "request_", [UpRequest(["job.py", "--set=a=\n"], "out"), PartsRequest("a folder", 3, "out")]
)
def test_a_request_is_a_line(request_: HostRequest) -> None:
    line = encode_request(request_)
    assert line.index("\n") == len(line) - 1
    assert decode_request(line) == request_
