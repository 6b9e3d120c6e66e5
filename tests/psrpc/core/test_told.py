"""Text from peers is cut and made harmless for terminals before people see it."""

from __future__ import annotations

import pytest

from psrpc.core.text import WORDS_CHARS, sanitize


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", ""),
        ("shard 0 of Zürich, 東京", "shard 0 of Zürich, 東京"),
        ("two\nlines", "two\nlines"),
        ("a\x1b[2Jb", "a\ufffd[2Jb"),
        ("\x1b]0;owned\x07", "\ufffd]0;owned\ufffd"),
        ("a\r\tb\x9b", "a\ufffd\ufffdb\ufffd"),
        ("\u202egnp", "\ufffdgnp"),
        ("x" * 9999, "x" * (WORDS_CHARS - 1) + "…"),
    ],
)
def test_sanitized_texts(given: str, shown: str) -> None:
    assert sanitize(given) == shown
    assert sanitize(shown) == shown
