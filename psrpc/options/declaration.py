"""Declares options: a field of a frozen dataclass is an option, and its only declaration.

The flag, the environment variable, the key in a TOML file, and the lines in ``--help``,
``--show-config`` and ``docs/options.md`` are all derived from the field.
"""

from __future__ import annotations

import argparse
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from psrpc.files.urls import is_url


def run_path(text: str) -> Path:
    """Converts the path of a run, or of a part of one; refuses URLs."""
    if is_url(text):
        raise ArgumentTypeError(
            f"{text!r} is a URL; expected a path: runs lie on a POSIX file system that the "
            "coordinator and all shards share (data, init_from and exports may be URLs)"
        )
    return Path(text)


SHARDS = "default: 1; 0 if workers host all parameters (dense=allreduce)"
"""Help of ``--shards``."""


def positive(text: str) -> int:
    """Converts a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def natural(text: str) -> int:
    """Converts a whole number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def gpu_choice(text: str) -> str:
    """Checks a choice of GPUs and returns it."""
    indices = text.split(",")
    twice = len(set(indices)) < len(indices)
    if text not in ("auto", "none", "all") and (twice or not all(map(str.isdecimal, indices))):
        raise ArgumentTypeError(f"{text!r} is not auto, none, all or indices of GPUs, as in 0,1")
    return text


def cpu_devices(text: str) -> str:
    """Checks a number of devices into which to divide the CPU, and returns it."""
    if re.fullmatch("cpu:[1-9][0-9]?", text) is None:
        raise ArgumentTypeError(f"{text!r} is not cpu:N, with N from 1 to 99")
    return text


def duration_s(text: str) -> float:
    """Converts a number of seconds."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def factor(text: str) -> float:
    """Converts a number of at least 1."""
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def fraction(text: str) -> float:
    """Converts a number of more than 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not more than 0 and at most 1")
    return value


def _number(text: str) -> float:
    """Parses a number; returns -1 for other text, which no option accepts."""
    try:
        return float(text)
    except ValueError:
        return -1.0


Kind = Literal["flag", "flag or text", "list", "whole number", "number", "text"]
"""The kind of value that an option takes."""

_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}

_KINDS: dict[Any, Kind] = {int: "whole number", float: "number", str: "text", Path: "text"}
_TYPES: dict[Kind, tuple[type, ...]] = {
    "flag": (bool,),
    "flag or text": (bool, str),
    "whole number": (int,),
    "number": (int, float),
    "text": (str,),
}
_DECLARED = "option"


class NotThis(Exception):
    """A value cannot be used; the message is the description of an expected value."""


def flag_from_text(text: str) -> bool:
    """Parses a boolean in an environment variable. Raises NotThis."""
    if text.lower() not in _FLAGS:
        raise NotThis("true or false")
    return _FLAGS[text.lower()]


def option(
    text: str,
    default: Any = MISSING,
    *,
    flag: str = "",
    metavar: str | None = None,
    convert: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    const: str | None = None,
    group: str = "",
) -> Any:
    """Declares a field as an option; the annotation of the field is its type.

    Args:
        text: for ``--help``; ``%(default)s`` stands for the default.
        default: if it is missing, the option must be set by the user.
        flag: if it is not the name of the field: ``--run-dir`` for ``run_dir``, ``--no-shm`` for a
            ``shm`` that is true by default.
        convert: checks and converts a text; by default the type of the field.
        const: the value if the flag is given without a value; None if it needs a value.
        group: the heading in ``--help``.
    """
    declared = (text, flag, metavar, convert, choices, const, group)
    return field(default=default, metadata={_DECLARED: declared})


@dataclass(frozen=True)
class Option:
    """A setting of a command.

    Attributes:
        name: the name of the field that declares it.
        key: its name in files and, in capitals, in the environment. The flag ``--no-shm`` has the
            key ``shm``, because files and variables set a value of true or false.
        flag: its name on the command line.
        default: the default; None if there is none.
    """

    name: str
    key: str
    flag: str
    kind: Kind
    default: Any
    required: bool
    help: str
    metavar: str | None
    convert: Callable[[str], Any]
    choices: Sequence[str] | None
    const: str | None
    group: str

    def arguments(self, note: str = "") -> dict[str, Any]:
        """Returns the arguments of ``add_argument`` for the flag. If the flag is absent, the parsed
        arguments have no such attribute.

        Args:
            note: text to add to the help of the option.
        """
        shown = self.help.replace("%(default)s", str(self.default)) + note
        said: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": shown}
        if self.kind == "flag":
            said["action"] = "store_false" if self.default else "store_true"
        else:
            said |= {"metavar": self.metavar, "type": self.convert, "choices": self.choices}
        if self.kind == "list":
            said["action"] = "append"
        if self.const is not None:
            said |= {"nargs": "?", "const": self.const}
        return said

    def from_text(self, text: str) -> Any:
        """Parses the text of an environment variable, or of TF_CONFIG.

        A list is written as in a shell: ``epochs=3 optimizer.learning_rate=0.1``.

        Raises:
            NotThis: the option does not allow this value.
        """
        if self.kind == "flag":
            return flag_from_text(text)
        if self.kind == "flag or text" and text.lower() in _FLAGS:
            return self.from_toml(_FLAGS[text.lower()])
        if self.kind == "list":
            try:
                return tuple(self._one(word) for word in shlex.split(text))
            except ValueError:
                raise NotThis("words as in a shell; a quote is left open") from None
        return self._one(text)

    def from_toml(self, value: Any) -> Any:
        """Converts a value of a TOML file. Raises NotThis."""
        if self.kind == "list":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise NotThis('a list of texts, as in ["KEY=VALUE"]')
            return tuple(map(self._one, value))
        wanted = _TYPES[self.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise NotThis(self._expected())
        if self.kind == "flag or text" and isinstance(value, bool):
            return self.const if value else self.default
        return value if self.kind == "flag" else self._one(str(value))

    def _one(self, text: str) -> Any:
        try:
            value = self.convert(text)
        except argparse.ArgumentTypeError as error:
            raise NotThis(f"{self._expected()}: {error}") from None
        except ValueError:
            raise NotThis(self._expected()) from None
        if self.choices is not None and value not in self.choices:
            raise NotThis(self._expected())
        return value

    def _expected(self) -> str:
        if self.kind == "flag":
            return "true or false"
        if self.choices is not None:
            choices = " or ".join(self.choices)
            return f"true or false or {choices}" if self.kind == "flag or text" else choices
        metavar = self.metavar or ""
        return f"a {self.kind}" + (f" ({metavar})" if len(metavar) > 1 else "")


def options_of(declaring: type) -> tuple[Option, ...]:
    """Returns the options that a dataclass declares, including inherited ones and those of
    groups."""
    hints = get_type_hints(declaring)
    found = [
        (declared.kw_only, _option(declared, hints[declared.name]))
        for declared in fields(declaring)
        if _DECLARED in declared.metadata
    ]
    return tuple(one for _, one in sorted(found, key=lambda each: (each[0], each[1].group)))


def _option(declared: Field[Any], hint: Any) -> Option:
    text, flag, metavar, convert, choices, const, group = declared.metadata[_DECLARED]
    if get_origin(hint) is UnionType:
        [hint] = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        hint, choices = str, get_args(hint)
    required = declared.default is MISSING
    off = hint is bool and declared.default is True
    flag = flag or f"--{'no-' if off else ''}{declared.name.replace('_', '-')}"
    kind: Kind
    if hint is bool:
        kind = "flag"
    elif get_origin(hint) is tuple:
        kind, hint = "list", str
    else:
        kind = "flag or text" if const is not None else _KINDS[hint]
    return Option(
        name=declared.name,
        key=flag.removeprefix("--no-" if off else "--").replace("-", "_"),
        flag=flag,
        kind=kind,
        default=None if required else declared.default,
        required=required,
        help=text,
        metavar=metavar,
        convert=convert or hint,
        choices=choices,
        const=const,
        group=group,
    )
