"""Coverage-guided fuzzing, by hand and for long; Linux on x86-64.

python -m tests.fuzz codec
python -m tests.fuzz manifest -max_total_time=600
python -m tests.fuzz overrides -max_total_time=600
python -m tests.fuzz all 600

The last one gives all targets so many seconds together. What follows a target goes to
libFuzzer. Input that is found to break something is written to the working directory, and is given
to the target again with its file's name as an argument.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["psrpc", "worker", "pserver", "coordinator"]):
    from tests.fuzz.targets import OF_SERVERS, TARGETS, seeds

SERVERS_SHARE = 3
"""An input of theirs takes a hundred times as long as one of a parser."""


def main() -> None:
    """The command; libFuzzer ends the process."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "all":
        sys.exit(_all(float(sys.argv[2])))
    if name not in TARGETS:
        sys.exit(
            f"usage: python -m tests.fuzz {{{','.join(TARGETS)}}} [libFuzzer's options]\n"
            "       python -m tests.fuzz all SECONDS"
        )
    # What is refused is logged; thousands of lines a second say nothing.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for index, seed in enumerate(seeds(name)):
            (Path(folder) / f"seed-{index}").write_bytes(seed)
        options = sys.argv[2:] or ["-max_total_time=60"]
        atheris.Setup([sys.argv[0], *options, folder], TARGETS[name])
        atheris.Fuzz()


def _all(seconds: float) -> str | int:
    """Every target for its share of the time, each in a process of its own; those that failed."""
    shares = {name: SERVERS_SHARE if name in OF_SERVERS else 1 for name in TARGETS}
    failed = []
    for name, share in shares.items():
        its_s = max(1, round(seconds * share / sum(shares.values())))
        print(f"== {name}: {its_s} s", flush=True)  # noqa: T201
        options = [f"-max_total_time={its_s}", "-verbosity=1", "-print_final_stats=1"]
        ran = subprocess.run([sys.executable, "-m", "tests.fuzz", name, *options], check=False)
        if ran.returncode:
            failed.append(name)
    return f"broken: {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    main()
