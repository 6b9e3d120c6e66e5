"""Coverage-guided fuzzing, by hand and for long; Linux on x86-64.

python -m tests.fuzz codec
python -m tests.fuzz manifest -max_total_time=600
python -m tests.fuzz plan,overrides -runs=1000
python -m tests.fuzz all 600

The last one gives all targets so many seconds together. What follows a target goes to
libFuzzer. Input that is found to break something is written to the working directory, and is given
to the target again with its file's name as an argument. Several targets run one after the other, in
forks: to import what they need takes longer than a thousand inputs.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["psrpc", "worker", "pserver", "coordinator"]):
    from tests.fuzz.targets import OF_SERVERS, TARGETS, seeds

SERVERS_SHARE = 3
"""An input of theirs takes a hundred times as long as one of a parser."""


def main() -> None:
    """The command; libFuzzer ends the process."""
    name, *options = sys.argv[1:] or [""]
    if name == "all":
        sys.exit(_each(_shares(float(options[0]))))
    if not {*name.split(",")} <= TARGETS.keys():
        sys.exit(
            f"usage: python -m tests.fuzz {{{','.join(TARGETS)}}} [libFuzzer's options]\n"
            "       python -m tests.fuzz all SECONDS"
        )
    options = options or ["-max_total_time=60"]
    if "," in name:
        sys.exit(_each(dict.fromkeys(name.split(","), options)))
    _fuzz(name, options)


def _fuzz(name: str, options: Sequence[str]) -> None:
    # What is refused is logged; thousands of lines a second say nothing.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for index, seed in enumerate(seeds(name)):
            (Path(folder) / f"seed-{index}").write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, folder], TARGETS[name])
        atheris.Fuzz()


def _shares(seconds: float) -> Mapping[str, Sequence[str]]:
    """The options of every target, for its share of the time."""
    shares = {name: SERVERS_SHARE if name in OF_SERVERS else 1 for name in TARGETS}
    times = {name: max(1, round(seconds * n / sum(shares.values()))) for name, n in shares.items()}
    return {
        name: [f"-max_total_time={its_s}", "-verbosity=1", "-print_final_stats=1"]
        for name, its_s in times.items()
    }


def _each(targets: Mapping[str, Sequence[str]]) -> str | int:
    """Runs every target with its options, each in a fork of this process, which has done nothing
    but imports; those that failed."""
    failed = []
    for name, options in targets.items():
        print(f"== {name} {' '.join(options)}", flush=True)  # noqa: T201
        pid = os.fork()
        if not pid:
            _fuzz(name, options)
            os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            failed.append(name)
    return f"broken: {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    main()
