"""Values of settings: from the text of a variable, or from what TOML has, to what an option holds.

The options themselves say what they take, since they are ``argparse`` actions.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["flag", "flag or text", "list", "whole number", "number", "text"]
"""The kind of value that an option takes."""

_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}

_KINDS: dict[str, Kind] = {"int": "whole number", "float": "number", "str": "text", "Path": "text"}
_TYPES: dict[Kind, tuple[type, ...]] = {
    "flag": (bool,),
    "flag or text": (bool, str),
    "whole number": (int,),
    "number": (int, float),
    "text": (str,),
}


class NotThis(Exception):
    """The value cannot be used; the message says what was expected."""


def flag_from_text(text: str) -> bool:
    """Whether the text of a variable says yes. Raises NotThis."""
    if text.lower() not in _FLAGS:
        raise NotThis("true or false")
    return _FLAGS[text.lower()]


@dataclass(frozen=True)
class Option:
    """A setting of a command.

    Attributes:
        key: its name in files, and in the environment in capitals.
        flag: its name on the command line.
    """

    key: str
    flag: str
    action: argparse.Action
    kind: Kind
    default: Any
    required: bool

    def from_text(self, text: str) -> Any:
        """Parses the text of an environment variable, or of TF_CONFIG.

        A list is written as in a shell: ``epochs=3 optimizer.learning_rate=0.1``.

        Raises:
            NotThis: the option takes no such value.
        """
        if self.kind == "flag":
            return flag_from_text(text)
        if self.kind == "flag or text" and text.lower() in _FLAGS:
            return self.from_toml(_FLAGS[text.lower()])
        if self.kind == "list":
            try:
                return [self._one(word) for word in shlex.split(text)]
            except ValueError:
                raise NotThis("words as in a shell; a quote is left open") from None
        return self._one(text)

    def from_toml(self, value: Any) -> Any:
        """Converts a value of a TOML file. Raises NotThis."""
        if self.kind == "list":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise NotThis('a list of texts, as in ["KEY=VALUE"]')
            return [self._one(one) for one in value]
        wanted = _TYPES[self.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise NotThis(self._expected())
        if self.kind == "flag or text" and isinstance(value, bool):
            return self.action.const if value else self.default
        return value if self.kind == "flag" else self._one(str(value))

    def _one(self, text: str) -> Any:
        convert: Any = self.action.type or str
        try:
            value = convert(text)
        except argparse.ArgumentTypeError as error:
            raise NotThis(f"{self._expected()}: {error}") from None
        except ValueError:
            raise NotThis(self._expected()) from None
        choices = self.action.choices
        if choices is not None and value not in choices:
            raise NotThis(self._expected())
        return value

    def _expected(self) -> str:
        if self.kind == "flag":
            return "true or false"
        if self.action.choices is not None:
            choices = " or ".join(map(str, self.action.choices))
            return f"true or false or {choices}" if self.kind == "flag or text" else choices
        metavar = self.action.metavar
        return f"a {self.kind}" + (f" ({metavar})" if metavar and len(str(metavar)) > 1 else "")


def option_of(action: argparse.Action) -> Option:
    """The setting that an option of a parser is.

    ``--no-shm`` is the setting ``shm``: one is asked what is wanted, not what is not.
    """
    flag = next(text for text in action.option_strings if text.startswith("--"))
    if isinstance(action, argparse._StoreFalseAction):
        key = action.dest
    else:
        key = flag.removeprefix("--").replace("-", "_")
    return Option(key, flag, action, _kind(action), action.default, action.required)


def _kind(action: argparse.Action) -> Kind:
    if action.nargs == 0:
        return "flag"
    if action.nargs == "?":
        return "flag or text"
    if isinstance(action, argparse._AppendAction):
        return "list"
    convert: Any = action.type or str
    name = convert.__name__
    if not isinstance(convert, type):
        # A function that checks: it says what it returns.
        returned = getattr(convert, "__annotations__", {}).get("return", "str")
        name = getattr(returned, "__name__", str(returned))
    assert name in _KINDS, f"{action.option_strings}: {name} is none of {get_args(Kind)}"
    return _KINDS[name]
