"""A program that ends as it is told: ``python -m tests.launchers.endings STATUS WORDS`` at once,
with ``stay`` in place of a status at a signal: 75 after SIGTERM, 0 after SIGUSR1."""

import signal
import sys


def say(*words: str) -> None:
    """Writes a line to the log."""
    print(*words, file=sys.stderr, flush=True)  # noqa: T201


def drain(*_signal: object) -> None:
    """Ends as a drained process does."""
    say("drained")
    sys.exit(75)


if sys.argv[1] == "stay":
    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    say("began", *sys.argv[2:])
    signal.pause()
say(sys.argv[2])
sys.exit(int(sys.argv[1]))
