"""Where the figures of a benchmark go: raw into a JSON file, as tables into README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SampleT = TypeVar("SampleT", bound="DataclassInstance")

README = Path(__file__).resolve().parent / "README.md"

PACKAGES = ("tensorflow", "keras", "grpcio", "numpy", "torch", "ray")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options that say where figures go."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure")
    parser.add_argument(
        "--readme", action="store_true", help="put the tables into benchmarks/README.md"
    )


def publish(
    section: str,
    samples: Iterable[SampleT],
    table: Callable[[Sequence[SampleT]], str],
    options: argparse.Namespace,
) -> None:
    """Says each of ``samples``, dataclasses, as it is measured; then prints their table and writes
    what ``options`` of :func:`add_arguments` ask for. If measuring is cut short, everything but
    ``section`` of the README is still written."""
    measured: list[SampleT] = []
    try:
        for sample in samples:
            say(str(sample))
            measured.append(sample)
    finally:
        text = table(measured)
        sys.stdout.write(text)
        if options.json:
            write_json(options.json, {"samples": list(map(asdict, measured))})
    if options.readme:
        write_section(section, text)


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Writes ``document`` with what it was measured on."""
    path.write_text(json.dumps({"machine": machine(), **document}, indent=1) + "\n")


def machine() -> dict[str, object]:
    """The properties of the machine that figures depend on."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": versions,
    }


def write_section(name: str, text: str, path: Path = README) -> None:
    """Replaces what stands between the markers ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    Raises:
        ValueError: the file has no such markers.
    """
    page = path.read_text()
    path.write_text(replace_section(page, name, text))


def replace_section(page: str, name: str, text: str) -> str:
    """See :func:`write_section`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there are no markers {begin.strip()} and {end}")
    return f"{head}{begin}\n{text.strip()}\n\n{end}{tail}"


def say(text: str) -> None:
    """A line for who watches; the tables alone go to stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
