"""The standard gRPC health service of our servers, without ``Watch``.

A watch lasts until whoever watches is gone. On a server with threads it would keep one of them for
so long, on the other one of the calls that are served at once, and everybody may ask.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health

LIVES = ""
"""The name under which a server says that it lives, from its first moment until it stops. Under the
name of its service it says whether it serves its part of a job."""

WHY = "this server's health cannot be watched; ask grpc.health.v1.Health/Check again and again"


class HealthServicer(health.HealthServicer):
    """For servers with threads."""

    def Watch(  # noqa: N802
        self, _request: Any, context: grpc.ServicerContext, _callback: Any = None
    ) -> NoReturn:
        """Refuses at once, with the status by which clients know that they need not try again."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)


class AioHealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # made at import
    """For asyncio servers."""

    async def Watch(self, _request: Any, context: Any) -> None:  # noqa: N802
        """Refuses at once, as the other does."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)
