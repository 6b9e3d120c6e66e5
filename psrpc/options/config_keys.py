"""The names of all settings of all commands in a file or the environment."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from psrpc.core.errors import InvalidArgument
from psrpc.options.declaration import options_of
from psrpc.options.settings import SETTINGS_OF

PREFIX = "PSERVER_"

SECTIONS = ("common", *SETTINGS_OF)
"""Sections of the TOML file: ``[common]`` for all commands, then one section for each."""

KEYS_OF = {
    section: frozenset(option.key for option in options_of(settings))
    for section, settings in SETTINGS_OF.items()
}
"""Section -> its settings. Does not list ``[common]``, which may have any setting."""

KEYS = frozenset[str]().union(*KEYS_OF.values()) | {"config"}

_OF_KUBERNETES = re.compile(
    PREFIX + r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_[A-Z]+(_(ADDR|PORT|PROTO))?)?)"
)
"""Variables that Kubernetes sets in pods for a service called pserver or pserver-…."""


def variable(key: str) -> str:
    """Returns the environment variable of a setting: ``PSERVER_RUN_DIR`` for ``run_dir``."""
    return PREFIX + key.upper()


def is_a_setting(name: str) -> bool:
    """Whether the environment variable ``name`` has our prefix and was not set by Kubernetes."""
    return name.startswith(PREFIX) and not _OF_KUBERNETES.fullmatch(name)


def check_key_names(environment: Mapping[str, str]) -> None:
    """Raises InvalidArgument for a variable with our prefix that is not a setting of any command;
    suggests the most similar setting."""
    known = {variable(key) for key in KEYS}
    for name in sorted(filter(is_a_setting, environment)):
        if name not in known:
            close = did_you_mean(name, known)
            raise InvalidArgument(f"{name} is set and is not a setting; unset it{close}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'shard'?``; empty if no known name is similar."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
