"""Generates ``psrpc/v1`` from ``protos/``; with ``--check`` only says what would change."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
PACKAGE = Path("psrpc/v1")


def generate(out: Path) -> None:
    """Writes the generated modules below ``out``.

    Raises:
        RuntimeError: protoc refused; it has said why on standard error.
    """
    files = sorted(PROTOS.glob("psrpc/v1/*.proto"))
    # A file without a service would give an empty module.
    services = [file for file in files if "\nservice " in file.read_text()]
    include = Path(grpc_tools.__file__).parent / "_proto"
    for outputs, inputs in (
        ([f"--python_out={out}", f"--pyi_out={out}"], files),
        ([f"--grpc_python_out={out}"], services),
    ):
        command = ["protoc", f"-I{PROTOS}", f"-I{include}", *outputs, *map(str, inputs)]
        if protoc.main(command) != 0:
            raise RuntimeError("protoc failed")


def drift() -> list[str]:
    """Names of the generated files that are not what the protos say, missing and surplus ones
    included."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        expected = _contents(Path(folder) / PACKAGE)
    committed = _contents(ROOT / PACKAGE)
    names = expected.keys() | committed.keys()
    return sorted(name for name in names if expected.get(name) != committed.get(name))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*") if path.is_file()}


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    changed = drift()
    if changed:
        print(f"{PACKAGE} is out of date ({', '.join(changed)}); run: make protos", file=sys.stderr)  # noqa: T201
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
