"""The table of who may call what: as the table of permissions has it, and as servers answered."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from psrpc.security.identity import PERMISSIONS, Role
from tests.security.rpcs import Answer

UNANSWERED = {"/grpc.health.v1.Health/List", "/grpc.health.v1.Health/Watch"}
"""Who may call them is told that there is no such thing: see psrpc.net.health."""

NO_CONNECTION = "—"
UNKNOWN = "?"
REFUSED = "✗"
DONE = "✓"
NOT_THERE = "∅"

SYMBOLS = {
    grpc.StatusCode.UNAUTHENTICATED: UNKNOWN,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: NOT_THERE,
}

STRANGERS = {
    "plaintext": NO_CONNECTION,
    "no certificate": NO_CONNECTION,
    "of other authority": NO_CONNECTION,
    "expired": NO_CONNECTION,
    "of other job": REFUSED,
    "of no role": UNKNOWN,
    "revoked": UNKNOWN,
}
"""Who calls with a certificate that is no member's, and what comes of any call."""

BEARERS = {
    "plaintext": NO_CONNECTION,
    "the token in plaintext": NO_CONNECTION,
    "no token": UNKNOWN,
    "a certificate, no token": UNKNOWN,
    "another token": UNKNOWN,
    "the token of another scheme": UNKNOWN,
    "the token twice": UNKNOWN,
}
"""Who calls a server with a token file, and what comes of any call; of the token itself, see
:func:`expected`."""

TOKEN = "the token"

HEAD = """# Who may call what

Made by `make matrix` from what real servers answered to real calls, see `tests/security`. ✓ let
through; ∅ let through, and told that there is no such thing; — no connection comes about; ? a
caller without an identity; ✗ refused by name. After every refusal the server's state was compared
with that before: nothing had changed.

## With certificates

"""

WITH_TOKENS = """
## With a token file

One secret stands for every role, and goes over TLS alone.

"""

Cell = tuple[str, str]
"""An RPC, in full, and who calls it."""


def symbol(answer: Answer) -> str:
    """The table's symbol for the result of a call."""
    return SYMBOLS.get(answer.code, DONE) if answer.connected else NO_CONNECTION


def when_let_through(rpc: str) -> str:
    """The table's symbol for an RPC that the caller may call."""
    return NOT_THERE if rpc in UNANSWERED else DONE


def expected(rpcs: Iterable[str]) -> tuple[dict[Cell, str], dict[Cell, str]]:
    """The table as the permissions imply it: with certificates, and with a token file."""
    roles, tokens = {}, {}
    for rpc in rpcs:
        done = when_let_through(rpc)
        for who, found in STRANGERS.items():
            roles[rpc, who] = found
        for role in Role:
            roles[rpc, role.value] = done if role in PERMISSIONS[rpc] else REFUSED
        for who, found in BEARERS.items():
            tokens[rpc, who] = found
        tokens[rpc, TOKEN] = done
    return roles, tokens


def document(roles: dict[Cell, str], tokens: dict[Cell, str]) -> str:
    """``docs/matrix.md``."""
    return (
        HEAD + _table(roles, [*STRANGERS, *Role]) + WITH_TOKENS + _table(tokens, [*BEARERS, TOKEN])
    )


def _table(seen: dict[Cell, str], callers: list[str]) -> str:
    rows = [["RPC", *callers], ["---"] * (1 + len(callers))]
    for rpc in sorted({rpc for rpc, _ in seen}):
        service, _, method = rpc.rpartition("/")
        name = f"{service.rpartition('.')[2]}.{method}"
        rows.append([f"`{name}`", *(seen.get((rpc, who), "") for who in callers)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
