"""Coverage-guided fuzzing, by hand and for long; Linux on x86-64.

python -m tests.fuzz codec
python -m tests.fuzz manifest -max_total_time=600
python -m tests.fuzz overrides -max_total_time=600

What follows the target goes to libFuzzer. Input that is found to break something is written to the
working directory, and is given to the target again with its file's name as an argument.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["psrpc", "worker"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    """The command; libFuzzer ends the process."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(TARGETS)}}} [libFuzzer's options]")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for index, seed in enumerate(seeds(name)):
            (Path(folder) / f"seed-{index}").write_bytes(seed)
        options = sys.argv[2:] or ["-max_total_time=60"]
        atheris.Setup([sys.argv[0], *options, folder], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
