"""Hides secrets in settings that are shown to people. Imports nothing that takes long."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "(not shown)"
"""In place of the whole value."""

_STARS = "***"

_SECRET = r"pass|pwd|auth|secret|token|key|credential|signature|\bsig"

_IS_SECRET = re.compile(rf"(?:{_SECRET})", re.IGNORECASE)
_NAMES_A_PLACE = re.compile(r"_(file|dir|path)$", re.IGNORECASE)

_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"]*@")
"""``user:password@`` before a host, up to the last ``@``: a password may have one."""

_PARAMETER = re.compile(
    rf"(^|[?&;#\s'\"])([^=&;?#\s'\"]*(?:{_SECRET})[^=&;?#\s'\"]*)=([^&;#\s'\"]+)", re.IGNORECASE
)
"""``name=value`` of a query, or of an override of a setting."""


def is_secret_name(name: str) -> bool:
    """Whether what is called so (``S3_SECRET_KEY``, ``api_token``) is nobody's business; what ends
    in ``_FILE``, ``_DIR`` or ``_PATH`` says where a secret is, and is none."""
    return bool(_IS_SECRET.search(name)) and not _NAMES_A_PLACE.search(name)


def without_secrets(text: str) -> str:
    """``text`` without user and password in URLs, and without the values of what bears the name of
    a secret: parameters of a URL, overrides."""

    def starred(found: re.Match[str]) -> str:
        if not is_secret_name(found[2]):
            return found[0]
        return f"{found[1]}{found[2]}={_STARS}"

    return _PARAMETER.sub(starred, _USER.sub(rf"\1{_STARS}@", text))


def document_without_secrets(value: Any) -> Any:
    """The same of all texts in plain JSON types, and of what stands under the name of a secret."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list):
        return [document_without_secrets(one) for one in value]
    if isinstance(value, dict):
        return {
            key: HIDDEN
            if isinstance(one, str) and is_secret_name(key)
            else document_without_secrets(one)
            for key, one in value.items()
        }
    return value
