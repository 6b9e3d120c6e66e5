"""The command ``pserver lookup``."""

from __future__ import annotations

import argparse
import json
import sys

from pserver.client.lookup import FoundRows, RowReader
from psrpc.core.errors import CoordinatorUnreachable, InvalidArgument, PsError, error_line
from psrpc.options.locate import find_coordinator, find_run, find_security, not_running
from psrpc.options.security_options import who_asks
from psrpc.security.identity import Role

EXIT_LOST = 1
EXIT_BAD_INPUT = 2

_LIMIT = 1 << 63

_Key = int | str


def run_lookup(arguments: argparse.Namespace) -> int:
    """Prints the requested rows; returns the exit code."""
    table = arguments.table
    try:
        keys: list[_Key] = arguments.ids if arguments.strings else [*map(_id, arguments.ids)]
        found = _read(arguments, table, keys)
    except PsError as error:
        _say(error_line(error))
        return EXIT_BAD_INPUT if isinstance(error, InvalidArgument) else EXIT_LOST
    print(as_json(table, keys, found) if arguments.json else as_text(keys, found))  # noqa: T201
    return 0


def _read(arguments: argparse.Namespace, table: str, keys: list[_Key]) -> FoundRows:
    address, run_dir = find_coordinator(arguments), find_run(arguments)
    security = find_security(arguments, who_asks(arguments, (Role.OPERATOR, Role.READER)))
    with RowReader(address, arguments.timeout, security, _say) as reader:
        try:
            _check_kind(reader, table, keys)
            return reader.read(table, keys)
        except CoordinatorUnreachable as error:
            raise error if run_dir is None else not_running(run_dir, error) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _check_kind(reader: RowReader, table: str, keys: list[_Key]) -> None:
    """Refuses numbers for a table of strings. Only the command line refuses them: a program may
    look up numbers there, which are the ids that strings map to, as an exported table contains
    them."""
    kinds = {spec.name: spec.id_kind for spec in reader.tables()}
    if kinds.get(table) == "strings" and not isinstance(keys[0], str):
        raise InvalidArgument(
            f"table {table!r} has strings for ids; {keys[0]} is a number: say --strings, also for "
            "strings that look like numbers"
        )


def _id(argument: str) -> int:
    try:
        value = int(argument)
        if -_LIMIT <= value < _LIMIT:
            return value
    except ValueError:
        pass
    raise InvalidArgument(
        f"id {argument} is to be looked up; expected an int64; say --strings for a table whose ids "
        "are strings"
    )


def as_text(keys: list[_Key], found: FoundRows) -> str:
    """Formats a line with the row of each id or string, and marks initial values."""
    lines = []
    for one, row, present in zip(keys, found.rows, found.present, strict=True):
        values = " ".join(f"{value:.7g}" for value in row.tolist())
        shown = str(one).encode(errors="surrogateescape").decode(errors="replace")
        lines.append(f"{shown}  {values}" + ("" if present else "  (initial value)"))
    return "\n".join(lines)


def as_json(table: str, keys: list[_Key], found: FoundRows) -> str:
    """Formats the rows as one JSON object."""
    return json.dumps(
        {
            "table": table,
            "versions": found.versions,
            "rows": [
                {"id": one, "present": bool(present), "row": row.tolist()}
                for one, row, present in zip(keys, found.rows, found.present, strict=True)
            ],
        }
    )
