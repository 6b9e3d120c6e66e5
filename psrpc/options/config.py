"""The settings of a command, from wherever they come, and from where each one came.

In this order: the command line, ``PSERVER_*`` in the environment, a TOML file (``--config FILE``),
``TF_CONFIG``, the default. The options of the command are all that has to be said: a new one can be
set everywhere at once. Imports nothing that takes long.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from psrpc.options.config_value import NotThis, Option, option_of

_NOT_SETTINGS = {"help", "config", "show_config"}

_CONTRARY = {
    "insecure": ("certs", "token_file"),
    "certs": ("insecure",),
    "token_file": ("insecure",),
}
"""Settings that, said by one source, are not wanted any more of those after it."""


@dataclass(frozen=True)
class Setting:
    """One value and where it came from.

    Attributes:
        kind: ``"command line"``, ``"environment"``, ``"file"``, ``"TF_CONFIG"`` or ``"default"``.
        where: which option, variable, file and section; empty for a default.
    """

    value: Any
    kind: str = "default"
    where: str = ""

    @property
    def source(self) -> str:
        """In words."""
        return f"{self.kind} ({self.where})" if self.where else self.kind


class Configuration:
    """Completes what a parser has parsed. Make it once the parser has all of its options."""

    def __init__(self, parser: argparse.ArgumentParser, section: str) -> None:
        """Adds ``--config`` and ``--show-config``, and makes every option one that may be absent.

        Args:
            section: of the file; one of :data:`psrpc.options.config_keys.SECTIONS`.
        """
        self._section = section
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
        self._options: dict[str, Option] = {}
        for action in parser._actions:
            if action.dest in _NOT_SETTINGS or not action.option_strings:
                continue
            option = option_of(action)
            self._options[option.key] = option
            if action.help:
                action.help = action.help.replace("%(default)s", str(action.default))
                action.help += f"; required, {self._where(option)}" if option.required else ""
            # Absent from the parsed options unless the user sets it.
            action.default = argparse.SUPPRESS
            action.required = False

    @property
    def keys(self) -> frozenset[str]:
        """The settings that there are."""
        return frozenset(self._options)

    def settings(
        self, said: argparse.Namespace, environment: Mapping[str, str]
    ) -> dict[str, Setting]:
        """All settings, by key, in the order of the options. Reads the file, if there is one.

        Args:
            said: what the parser has parsed.

        Raises:
            InvalidArgument: a value, a variable or a key that cannot be; it names which, where, and
                what was expected.
        """
        found = {
            key: Setting(getattr(said, option.action.dest), "command line", option.flag)
            for key, option in self._options.items()
            if hasattr(said, option.action.dest)
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

    def complete(self, said: argparse.Namespace, environment: Mapping[str, str]) -> Completed:
        """The namespace as if everything had been said on the command line; ``elsewhere`` of it
        says, by key, where else a setting was said.

        Raises:
            InvalidArgument: see :meth:`settings`; or what has no default was said nowhere.
        """
        settings = self.settings(said, environment)
        options = self._options
        if said.show_config:
            rows = [(key, *_shown(options[key], setting)) for key, setting in settings.items()]
            file = _file(said, environment)
            rows.append(("config", str(file.value or "-"), file.source))
            return Completed(said, _table(rows))
        for key, setting in settings.items():
            if options[key].required and setting.value is None:
                raise InvalidArgument(
                    f"{options[key].flag} is missing; say it {self._where(options[key])}",
                    code="PS113",
                )
            setattr(said, options[key].action.dest, setting.value)
        said.elsewhere = {
            key: setting.where
            for key, setting in settings.items()
            if setting.where and setting.kind != "command line"
        }
        return Completed(said, "")

    def _where(self, option: Option) -> str:
        """Names the places in which an option without a default can be set."""
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
            # Compose and others cannot leave a variable out, only empty.
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
        """Checks the sections of other commands too: a cluster has one file, and the first process
        that reads it reports the mistake."""
        known = KEYS_OF.get(section, KEYS)
        if section == self._section:
            known = self.keys
        for key in keys:
            if key not in known:
                close = did_you_mean(key, known)
                raise InvalidArgument(f"{path}: [{section}] {key} is not a setting{close}")

    def _of_section(self, path: Path, section: str, keys: dict[str, Any]) -> dict[str, Setting]:
        found = {}
        for key, value in keys.items():
            said = f"{path}: [{section}] {key}"
            if key not in self._options:
                # Of another command.
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
            # Nothing is asked of it, so it may say what it likes.
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


@dataclass(frozen=True)
class Completed:
    """``arguments`` are complete, unless ``shown`` is there to be printed instead."""

    arguments: argparse.Namespace
    shown: str


def _file(said: argparse.Namespace, environment: Mapping[str, str]) -> Setting:
    """The TOML file and the option that names it; None and empty without one."""
    if said.config is not None:
        return Setting(said.config, "command line", "--config")
    named = environment.get(variable("config"))
    return Setting(named, "environment", variable("config")) if named else Setting(None)


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{wide[0]}}  {text:<{wide[1]}}  {source}" for key, text, source in rows)


def _shown(option: Option, setting: Setting) -> tuple[str, str]:
    """The value as one would write it in the environment, without secrets, and its source."""
    value = setting.value
    if value is None or value == "" or value == []:
        return ("-", "missing") if option.required else ("-", setting.source)
    if isinstance(value, bool):
        return str(value).lower(), setting.source
    if is_secret_name(option.key):
        return HIDDEN, setting.source
    if isinstance(value, list):
        return shlex.join(without_secrets(str(one)) for one in value), setting.source
    return without_secrets(str(value)), setting.source
