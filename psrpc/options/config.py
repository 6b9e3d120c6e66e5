"""The settings of a command, and the source of each.

Sources, highest precedence first: the command line, ``PSERVER_*`` in the environment, a TOML file
(``--config FILE``), ``TF_CONFIG``, the default. A new field of the class that declares a command's
options can be set in all of them at once. Imports nothing slow.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from psrpc.core.errors import InvalidArgument
from psrpc.core.text import HIDDEN, is_secret_name, without_secrets
from psrpc.options import config_tf
from psrpc.options.config_keys import (
    KEYS,
    KEYS_OF,
    SECTIONS,
    check_key_names,
    did_you_mean,
    variable,
)
from psrpc.options.declaration import NotThis, Option, options_of

if TYPE_CHECKING:
    from psrpc.options.settings import SecurityOptions

T = TypeVar("T", bound="SecurityOptions")

_CONTRARY = {
    "insecure": ("certs", "token_file"),
    "certs": ("insecure",),
    "token_file": ("insecure",),
}
"""Setting -> settings that contradict it. A setting from a source of higher precedence drops these
from sources of lower precedence."""


@dataclass(frozen=True)
class Setting:
    """A value and its source.

    Attributes:
        kind: ``"command line"``, ``"environment"``, ``"file"``, ``"TF_CONFIG"`` or ``"default"``.
        where: the option, the variable, or the file and section; empty for a default.
    """

    value: Any
    kind: str = "default"
    where: str = ""

    @property
    def source(self) -> str:
        """Describes the source."""
        return f"{self.kind} ({self.where})" if self.where else self.kind


class Configuration(Generic[T]):
    """Reads the options that a dataclass declares, from all sources."""

    def __init__(self, parser: argparse.ArgumentParser, section: str, declaring: type[T]) -> None:
        """Adds the declared options, ``--config`` and ``--show-config`` to ``parser``.

        Args:
            section: the section of the file; one of :data:`psrpc.options.config_keys.SECTIONS`.
        """
        self._section = section
        self._declaring = declaring
        self._options = {option.key: option for option in options_of(declaring)}
        required = [option for option in self._options.values() if option.required]
        add_options(
            parser, declaring, {each.key: f"; required, {self._where(each)}" for each in required}
        )
        group = parser.add_argument_group(
            "settings from elsewhere",
            f"Every option can also be set by an environment variable (--certs: "
            f"{variable('certs')}), in a TOML file ([{section}] or [common], certs = ...), "
            "and some by TF_CONFIG. In this order of precedence, after the command line.",
        )
        group.add_argument(
            "--config", type=Path, metavar="FILE", help="a TOML file (default: $PSERVER_CONFIG)"
        )
        group.add_argument(
            "--show-config",
            action="store_true",
            help="print every setting and where it comes from, and do nothing",
        )

    def settings(
        self, said: argparse.Namespace, environment: Mapping[str, str]
    ) -> dict[str, Setting]:
        """Returns all settings by key, in the order of the options. Reads the file, if there is
        one.

        Args:
            said: the parsed command line.

        Raises:
            InvalidArgument: a value, a variable or a key is not valid. Names it, its place, and the
                expected value.
        """
        found = {
            key: Setting(_spoken(option, said), "command line", option.flag)
            for key, option in self._options.items()
            if hasattr(said, option.name)
        }
        self._add(found, self._of_environment(environment))
        file = _file(said, environment).value
        if file:
            self._add(found, self._of_file(Path(file)))
        if environment.get(config_tf.NAME):
            self._add_tf(found, environment[config_tf.NAME])
        return {
            key: found.get(key, Setting(option.default)) for key, option in self._options.items()
        }

    def shown(self, said: argparse.Namespace, environment: Mapping[str, str]) -> str:
        """Formats all settings and their sources, one per line. Raises as :meth:`settings`."""
        settings, options = self.settings(said, environment), self._options
        rows = [(key, *_shown(options[key], setting)) for key, setting in settings.items()]
        file = _file(said, environment)
        rows.append(("config", str(file.value or "-"), file.source))
        return _table(rows)

    def options(self, said: argparse.Namespace, environment: Mapping[str, str]) -> T:
        """Returns the options. Their ``elsewhere`` has the sources of settings that are not from
        the command line.

        Raises:
            InvalidArgument: see :meth:`settings`; or a required option is set nowhere.
        """
        settings = self.settings(said, environment)
        for key, setting in settings.items():
            if self._options[key].required and setting.value is None:
                raise InvalidArgument(
                    f"{self._options[key].flag} is missing; say it "
                    f"{self._where(self._options[key])}",
                    code="PS113",
                )
        elsewhere = {
            key: setting.where
            for key, setting in settings.items()
            if setting.where and setting.kind != "command line"
        }
        values = {self._options[key].name: setting.value for key, setting in settings.items()}
        return self._declaring(**values, elsewhere=elsewhere)

    def _where(self, option: Option) -> str:
        """Lists the places where an option without a default can be set."""
        key = option.key
        where = f"on the command line, or as {variable(key)}, or as {key} in [{self._section}] of a"
        with_tf = ", or with TF_CONFIG" if key in config_tf.TAKEN[self._section] else ""
        return f"{where} --config file{with_tf}"

    @staticmethod
    def _add(found: dict[str, Setting], more: Mapping[str, Setting]) -> None:
        unwanted = {other for key in found if found[key].value for other in _CONTRARY.get(key, ())}
        for key, setting in more.items():
            if key not in unwanted:
                found.setdefault(key, setting)

    def _of_environment(self, environment: Mapping[str, str]) -> dict[str, Setting]:
        check_key_names(environment)
        found = {}
        for key in self._options:
            name = variable(key)
            # An empty variable counts as unset, because Compose and others cannot leave a variable
            # out.
            if text := environment.get(name):
                value = self._read(key, text, f"{name}={text!r}")
                found[key] = Setting(value, "environment", name)
        return found

    def _read(self, key: str, text: str, said: str) -> Any:
        try:
            return self._options[key].from_text(text)
        except NotThis as expected:
            raise InvalidArgument(f"{said}; expected {expected}") from None

    def _of_file(self, path: Path) -> dict[str, Setting]:
        import tomllib

        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument(f"--config {path}: {error.strerror}") from None
        except ValueError as error:
            raise InvalidArgument(f"--config {path} is not TOML: {error}") from None
        for section, keys in document.items():
            if section not in SECTIONS or not isinstance(keys, dict):
                what = f"[{section}]" if isinstance(keys, dict) else f"{section} before any section"
                close = did_you_mean(section, SECTIONS)
                expected = ", ".join(f"[{name}]" for name in SECTIONS)
                raise InvalidArgument(f"{path} has {what}; expected {expected}{close}")
            self._check_keys(path, section, keys)
        found: dict[str, Setting] = {}
        for section in (self._section, "common"):
            self._add(found, self._of_section(path, section, document.get(section, {})))
        return found

    def _check_keys(self, path: Path, section: str, keys: Mapping[str, Any]) -> None:
        """Checks the keys of any section. Sections of other commands are checked, too, so that the
        first process of a cluster that reads the common file reports a mistake."""
        known = KEYS_OF.get(section, KEYS)
        if section == self._section:
            known = frozenset(self._options)
        for key in keys:
            if key not in known:
                close = did_you_mean(key, known)
                raise InvalidArgument(f"{path}: [{section}] {key} is not a setting{close}")

    def _of_section(self, path: Path, section: str, keys: dict[str, Any]) -> dict[str, Setting]:
        found = {}
        for key, value in keys.items():
            said = f"{path}: [{section}] {key}"
            if key not in self._options:
                # A setting of another command.
                continue
            try:
                found[key] = Setting(
                    self._options[key].from_toml(value), "file", f"{path} [{section}]"
                )
            except NotThis as expected:
                raise InvalidArgument(f"{said} is {value!r}; expected {expected}") from None
        return found

    def _add_tf(self, found: dict[str, Setting], text: str) -> None:
        if all(key in found for key in config_tf.TAKEN[self._section]):
            # No setting is needed from TF_CONFIG, so it is not even checked.
            return
        for key, said in config_tf.values_of(self._section, text).items():
            if key not in found:
                value = self._read(key, said.text, f"TF_CONFIG has {said.where} = {said.text!r}")
                found[key] = Setting(value, "TF_CONFIG", said.where)
        if "coordinator" in config_tf.TAKEN[self._section] and "coordinator" not in found:
            raise InvalidArgument(
                f"{config_tf.NAME} has no chief, master or worker, of which the first would be the "
                f"coordinator; say --coordinator or {variable('coordinator')}, or unset "
                f"{config_tf.NAME}"
            )


def add_options(
    parser: argparse.ArgumentParser,
    declaring: type,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Adds the options that a dataclass declares to a parser.

    Args:
        notes: added to the help of options, by key.
    """
    add: dict[str, Callable[..., object]] = {"": parser.add_argument}
    for option in options_of(declaring):
        if option.group not in add:
            add[option.group] = parser.add_argument_group(option.group).add_argument
        add[option.group](option.flag, **option.arguments(notes.get(option.key, "")))


def _spoken(option: Option, said: argparse.Namespace) -> Any:
    """Returns the value of an option on the command line."""
    value = getattr(said, option.name)
    return tuple(value) if option.kind == "list" else value


def _file(said: argparse.Namespace, environment: Mapping[str, str]) -> Setting:
    """Returns the path of the TOML file and its source; a value of None if there is no file."""
    if said.config is not None:
        return Setting(said.config, "command line", "--config")
    named = environment.get(variable("config"))
    return Setting(named, "environment", variable("config")) if named else Setting(None)


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{wide[0]}}  {text:<{wide[1]}}  {source}" for key, text, source in rows)


def _shown(option: Option, setting: Setting) -> tuple[str, str]:
    """Returns the value, in the form of an environment variable and without secrets, and its
    source."""
    value = setting.value
    if value is None or value in ("", ()):
        return ("-", "missing") if option.required else ("-", setting.source)
    if isinstance(value, bool):
        return str(value).lower(), setting.source
    if is_secret_name(option.key):
        return HIDDEN, setting.source
    if isinstance(value, tuple):
        return shlex.join(without_secrets(str(one)) for one in value), setting.source
    return without_secrets(str(value)), setting.source
