"""Runs the code of its first argument, as ``python -m tests.psrpc.ops.forked CODE``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
