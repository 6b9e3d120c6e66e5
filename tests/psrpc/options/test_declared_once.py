"""An option is declared by one field, and from there it is known everywhere.

``docs/options.md`` lists all of them: ``make options``.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from psrpc.options.command_line import script
from psrpc.options.config import Configuration
from psrpc.options.config_keys import variable
from psrpc.options.config_tf import TAKEN
from psrpc.options.declaration import Option, option, options_of
from psrpc.options.settings import SETTINGS_OF, SecurityOptions, ShardOptions
from tests.psrpc.options.test_completion import PARSERS
from tests.test_architecture import ROOT

PAGE = ROOT / "docs" / "options.md"
HEADING = "## All options"
COMMANDS = {"coordinator": "serve", "pserver": "serve", "worker": "run"}
ALL = [(section, each) for section in SETTINGS_OF for each in options_of(SETTINGS_OF[section])]

TEXTS = {
    "devices": "cpu:2",
    "flag": "true",
    "list": "a=1 b=2",
    "whole number": "7",
    "number": "1.0",
}
TOML = {"flag": "true", "list": '["a=1", "b=2"]', "whole number": "7", "number": "1.0"}


def text_of(each: Option) -> str:
    """A value as an environment variable has it."""
    if each.choices:
        return each.choices[0]
    _, *words = (each.metavar or "").split("|")
    return words[0] if words else TEXTS.get(each.key, TEXTS.get(each.kind, "some:1"))


def toml_of(each: Option) -> str:
    quoted = f'"{text_of(each)}"'
    return quoted if each.choices else TOML.get(each.kind, quoted)


def row(key: str) -> str:
    """Of the page: an option, wherever it is known."""
    found = {section: each for section, each in ALL if each.key == key}
    each = next(iter(found.values()))
    value = "" if each.kind == "flag" else f" {each.metavar or key.upper()}"
    sections = ", ".join(
        f"`{section}`{' (required)' if one.required else ''}" for section, one in found.items()
    )
    taken = "yes" if any(key in TAKEN[section] for section in found) else ""
    shown = f"{each.flag}{value}".replace("|", "\\|")
    return f"| `{shown}` | `{variable(key)}` | `{key}` | {sections} | {taken} |"


def table() -> str:
    keys = sorted({each.key for _, each in ALL})
    head = "| option | environment | file | of | by `TF_CONFIG` |\n|---|---|---|---|---|\n"
    return head + "\n".join(map(row, keys)) + "\n"


def page() -> str:
    by_hand = PAGE.read_text().partition(HEADING)[0]
    said = "`--help` says what each of them does. `make options` makes this table."
    return f"{by_hand}{HEADING}\n\n{said}\n\n{table()}"


def parser_of(section: str) -> tuple[argparse.ArgumentParser, Configuration[Any]]:
    parser = argparse.ArgumentParser(prog=section)
    return parser, Configuration(parser, section, SETTINGS_OF[section])


@pytest.mark.parametrize(("section", "each"), ALL, ids=[f"{s}-{o.key}" for s, o in ALL])
def test_every_option_is_known_everywhere(section: str, each: Option, tmp_path: Path) -> None:
    parser, configuration = parser_of(section)
    assert f" {each.flag}" in parser.format_help()
    script_of(section, each.flag)
    nothing = parser.parse_args([])

    def source(environment: Mapping[str, str]) -> str:
        return configuration.settings(nothing, environment)[each.key].source

    assert source({}) == "default"
    name = variable(each.key)
    assert source({name: text_of(each)}) == f"environment ({name})"
    file = tmp_path / "c.toml"
    for of in (section, "common"):
        file.write_text(f"[{of}]\n{each.key} = {toml_of(each)}\n")
        assert source({"PSERVER_CONFIG": str(file)}) == f"file ({file} [{of}])"
    value = [text_of(each)] if each.kind not in ("flag", "list") else []
    value = ["a=1"] if each.kind == "list" else value
    shown = configuration.shown(parser.parse_args([each.flag, *value]), {})
    assert re.search(rf"^{each.key} .* command line \({each.flag}\)$", shown, re.MULTILINE)
    assert row(each.key) in PAGE.read_text()


def script_of(section: str, flag: str) -> None:
    """Asserts that the shell completes it."""
    prefix = f"_shtab_{section}_{COMMANDS[section]}_option_strings="
    [offered] = [one for one in SCRIPTS[section].splitlines() if one.startswith(prefix)]
    assert flag in re.findall(r"--[\w-]+", offered)


SCRIPTS = {section: script(PARSERS[section](), "bash") for section in COMMANDS}


def test_a_new_option_needs_no_second_declaration() -> None:
    @dataclasses.dataclass(frozen=True)
    class More(ShardOptions):
        patience_s: float = option("how long; default: %(default)s", 3.0, flag="--patience")

    known = {each.key: each for each in options_of(More)}
    assert set(known) == {each.key for each in options_of(ShardOptions)} | {"patience"}
    parser = argparse.ArgumentParser(prog="serve")
    configuration = Configuration(parser, "pserver", More)
    assert "--patience" in script(parser, "bash")
    assert "how long; default: 3.0" in parser.format_help()
    said = parser.parse_args(["--shard", "0", "--patience", "5"])
    assert configuration.options(said, {}).patience_s == 5
    assert "patience          5.0" in configuration.shown(said, {})


def test_the_kind_of_an_option_follows_from_its_type() -> None:
    @dataclasses.dataclass(frozen=True)
    class Kinds(SecurityOptions):
        on: bool = option("", default=True)
        run_dir: Path | None = option("", None)
        many: tuple[str, ...] = option("", ())

    known = {each.name: (each.flag, each.key, each.kind) for each in options_of(Kinds)}
    assert known["on"] == ("--no-on", "on", "flag")
    assert known["run_dir"] == ("--run-dir", "run_dir", "text")
    assert known["many"] == ("--many", "many", "list")


def test_the_page_is_up_to_date(pytestconfig: pytest.Config) -> None:
    report: Path | None = pytestconfig.getoption("--report")
    if report is not None:
        report.write_text(page())
    assert PAGE.read_text() == page(), "docs/options.md is out of date: make options"
