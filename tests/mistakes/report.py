"""``docs/mistakes.md``: what users do wrong, and what they are told, and after how long."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ERRORS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
TITLES = dict(
    re.findall(r"^### (PS\d{3})\n\n\*\*(.+?)\.?\*\*", ERRORS.read_text(), flags=re.MULTILINE)
)

LATE_S = 5.0
"""Who has made a mistake is told so within this time. Tests themselves have no such limit, since a
machine may be busy; ``make mistakes`` has."""

HEAD = f"""# What users do wrong

Made by `make mistakes`: each line is a test that makes the mistake and reads the answer. Seconds
are those of the whole test, with the servers and processes that it starts (TensorFlow alone takes
three) and, in the first of a file, imports: no answer takes longer. The command fails, and
names the mistake, where one takes more than {LATE_S:g} s.

| mistake | answer | seconds |
| --- | --- | ---: |
"""


@dataclass(frozen=True)
class Mistake:
    """One that was made.

    Attributes:
        codes: of the errors that came of it, in order.
        seconds: that the whole test took.
    """

    name: str
    codes: Sequence[str]
    seconds: float

    @property
    def line(self) -> str:
        """Of the table."""
        answers = [f"[{code}](errors.md#{code.lower()}): {TITLES[code]}" for code in self.codes]
        return f"| {self.name} | {'; '.join(answers) or 'in words'} | {self.seconds:.1f} |\n"


def document(mistakes: Iterable[Mistake]) -> str:
    """The whole file."""
    return HEAD + "".join(mistake.line for mistake in mistakes)


def late(mistakes: Iterable[Mistake]) -> list[str]:
    """A line for each mistake whose answer took too long."""
    return [
        f"told too late: {mistake.name} ({mistake.seconds:.1f} s; at most {LATE_S:g} s)"
        for mistake in mistakes
        if mistake.seconds > LATE_S
    ]
