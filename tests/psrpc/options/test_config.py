from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from psrpc.core.errors import InvalidArgument
from psrpc.options.config import Configuration
from psrpc.options.config_keys import KEYS, is_a_setting
from psrpc.options.declaration import option
from psrpc.options.settings import SecurityOptions, WorkerOptions


def _least_two(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 2")
    return int(text)


@dataclass(frozen=True)
class Options(SecurityOptions):
    shard: int = option("its index")
    shards: int | None = option("how many", None, convert=_least_two)
    run_dir: Path | None = option("default: %(default)s, 100%%", None)
    connect_timeout: float = option("seconds", 120.0)
    log_format: Literal["console", "json"] = option("of logs", "console")
    shm: bool = option("share memory", default=True)
    resume: bool = option("go on", default=False)
    overrides: tuple[str, ...] = option("of the job", (), flag="--set")
    goes_on: Literal["always", "auto", "never"] = option("or not", "never", const="always")
    gpu: str = option("which", "auto")
    coordinator: str | None = option("where", None)
    bind: str | None = option("where", None)
    advertise: str | None = option("where", None)


def make() -> tuple[argparse.ArgumentParser, Configuration[Options]]:
    parser = argparse.ArgumentParser(prog="serve")
    return parser, Configuration(parser, "pserver", Options)


def sources(argv: list[str], environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    parser, configuration = make()
    settings = configuration.settings(parser.parse_args(argv), environment)
    return {key: (setting.value, setting.source) for key, setting in settings.items()}


def completed(argv: list[str], environment: Mapping[str, str]) -> Options:
    parser, configuration = make()
    return configuration.options(parser.parse_args(argv), environment)


TF_CONFIG = '{"cluster": {"chief": ["c:1"], "ps": ["p:2"]}, "task": {"type": "ps", "index": 0}}'


def test_each_source_beats_those_after_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[pserver]\nshard = 3\n[common]\nshard = 4\ngpu = "none"\n')
    every = {"TF_CONFIG": TF_CONFIG, "PSERVER_SHARD": "2", "PSERVER_CONFIG": str(file)}
    assert sources(["--shard", "1"], every)["shard"] == (1, "command line (--shard)")
    assert sources([], every)["shard"] == (2, "environment (PSERVER_SHARD)")
    # An empty variable is one that is not set.
    assert sources([], every | {"PSERVER_SHARD": ""})["shard"] == (3, f"file ({file} [pserver])")
    assert sources([], every)["gpu"] == ("none", f"file ({file} [common])")
    assert sources([], {"TF_CONFIG": TF_CONFIG})["shard"] == (0, "TF_CONFIG (task.index)")
    assert sources([], {})["connect_timeout"] == (120.0, "default")


@pytest.mark.parametrize(
    "text", ['{"cluster": {"ps": ["p:2"]}, "task": {"type": "ps"}}', '{"task": {"type": "ps"}}']
)
def test_a_cluster_without_a_chief_needs_a_coordinator_from_elsewhere(text: str) -> None:
    said = {"TF_CONFIG": text, "PSERVER_SHARD": "0"}
    with pytest.raises(InvalidArgument, match="TF_CONFIG has no chief, master or worker"):
        completed([], said)
    assert completed([], said | {"PSERVER_COORDINATOR": "c:1"}).coordinator == "c:1"


def test_the_command_line_names_the_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[pserver]\nshard = 1")
    (tmp_path / "b").write_text("[pserver]\nshard = 2")
    said = ["--config", str(tmp_path / "a")]
    assert sources(said, {"PSERVER_CONFIG": str(tmp_path / "b")})["shard"][0] == 1


def test_values_of_the_environment_become_what_the_options_hold() -> None:
    said = completed(
        [],
        {
            "PSERVER_SHARD": "0",
            "PSERVER_SHARDS": "2",
            "PSERVER_RUN_DIR": "runs/a",
            "PSERVER_CONNECT_TIMEOUT": "1.5",
            "PSERVER_SHM": "off",
            "PSERVER_RESUME": "yes",
            "PSERVER_SET": "epochs=3 'name=a b'",
        },
    )
    assert (said.shard, said.shards, said.run_dir) == (0, 2, Path("runs/a"))
    assert (said.connect_timeout, said.shm, said.resume) == (1.5, False, True)
    assert said.overrides == ("epochs=3", "name=a b")
    assert said.gpu == "auto"


def test_values_of_a_file_become_what_the_options_hold(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[pserver]\nshard = 0\nconnect_timeout = 2\nshm = false\nset = ["epochs=3"]\n'
        '[worker]\ngpu = "is the worker\'s affair"\n[common]\njob = "of others"'
    )
    said = completed(["--config", str(file)], {})
    assert (said.shard, said.connect_timeout, said.shm) == (0, 2.0, False)
    assert said.overrides == ("epochs=3",)


def test_a_name_that_another_command_does_not_know_is_told_by_all(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[pserver]\nshard = 0\n[worker]\nshard = 2")
    with pytest.raises(InvalidArgument, match=r"\[worker\] shard is not a setting"):
        completed(["--config", str(file)], {})


def test_a_list_on_the_command_line_replaces_that_of_the_environment() -> None:
    said = completed(["--shard", "0", "--set", "a=1", "--set", "b=2"], {"PSERVER_SET": "c=3"})
    assert said.overrides == ("a=1", "b=2")


def test_an_option_overrides_its_opposite_of_a_later_source() -> None:
    everywhere = {"PSERVER_SHARD": "0", "PSERVER_CERTS": "certs", "PSERVER_TOKEN_FILE": "token"}
    said = completed(["--insecure"], everywhere)
    assert (said.insecure, said.certs, said.token_file) == (True, None, None)
    said = completed(["--certs", "certs"], {"PSERVER_SHARD": "0", "PSERVER_INSECURE": "1"})
    assert (said.insecure, said.certs) == (False, Path("certs"))
    # Of one source both arrive, and their reader complains.
    said = completed([], {**everywhere, "PSERVER_INSECURE": "1"})
    assert (said.insecure, said.certs) == (True, Path("certs"))
    # To say no is no contrary.
    assert completed([], {**everywhere, "PSERVER_INSECURE": "0"}).certs == Path("certs")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PSERVER_SHRD": "1"}, "PSERVER_SHRD is set and is not a setting; unset it; did "
         "you mean 'PSERVER_SHARD'?"),
        ({"PSERVER_shard": "1"}, "PSERVER_shard is set and is not a setting"),
        ({"PSERVER_SHARD": "one"}, "PSERVER_SHARD='one'; expected a whole number"),
        ({"PSERVER_SHARDS": "1"}, "PSERVER_SHARDS='1'; expected a whole number: '1' is less than"),
        ({"PSERVER_CONNECT_TIMEOUT": "soon"}, "PSERVER_CONNECT_TIMEOUT='soon'; expected a number"),
        ({"PSERVER_SHM": "maybe"}, "PSERVER_SHM='maybe'; expected true or false"),
        ({"PSERVER_SET": "a='"}, "a quote is left open"),
        ({"PSERVER_LOG_FORMAT": "xml"}, "PSERVER_LOG_FORMAT='xml'; expected console or json"),
        ({"PSERVER_CONFIG": "/nowhere"}, "--config /nowhere: No such file"),
        ({}, "--shard is missing; say it on the command line, or as PSERVER_SHARD, or as shard in "
         "[pserver] of a --config file, or with TF_CONFIG"),
    ],
)  # fmt: skip
def test_a_bad_variable_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completed([], environment)
    assert message in str(caught.value)
    assert caught.value.code == ("PS110" if environment else "PS113")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard = 1", "has shard before any section; expected [common], [coordinator], [pserver]"),
        ("[pservr]\nshard = 1", "has [pservr]; expected [common], [coordinator], [pserver], "
         "[worker]; did you mean 'pserver'?"),
        ("[pserver]\nshrd = 1", "[pserver] shrd is not a setting; did you mean 'shard'?"),
        ("[common]\nshrd = 1", "[common] shrd is not a setting; did you mean 'shard'?"),
        ("[pserver]\nreplicas = 1", "[pserver] replicas is not a setting"),
        ('[pserver]\nshard = "1"', "[pserver] shard is '1'; expected a whole number"),
        ("[pserver]\nshard = true", "[pserver] shard is True; expected a whole number"),
        ("[pserver]\nshard = 1.5", "[pserver] shard is 1.5; expected a whole number"),
        ("[pserver]\ngpu = 1", "[pserver] gpu is 1; expected a text"),
        ("[pserver]\nshm = 1", "[pserver] shm is 1; expected true or false"),
        ('[pserver]\nset = "a=1"', "[pserver] set is 'a=1'; expected a list of texts"),
        ("[pserver", "is not TOML: "),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        completed(["--config", str(file)], {})
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "said", "meant"),
    [
        (["--goes-on"], "", "always"),
        (["--goes-on", "auto"], "false", "auto"),
        (["--goes-on", "--gpu", "0"], "", "always"),
        ([], "", "never"),
        ([], "true", "always"),
        ([], "No", "never"),
        ([], "auto", "auto"),
        ([], "true in the file", "always"),
        ([], "auto in the file", "auto"),
    ],
)
def test_a_flag_that_may_have_a_value(
    tmp_path: Path, argv: list[str], said: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former flag is written as one in all places, and still means the same."""
    keys = frozenset({*KEYS, "goes_on"})
    monkeypatch.setattr("psrpc.options.config.KEYS", keys)
    monkeypatch.setattr("psrpc.options.config_keys.KEYS", keys)
    environment = {} if not said or "file" in said else {"PSERVER_GOES_ON": said}
    if "file" in said:
        value = "true" if said.startswith("true") else '"auto"'
        (tmp_path / "c.toml").write_text(f"[pserver]\ngoes_on = {value}\n")
        environment["PSERVER_CONFIG"] = str(tmp_path / "c.toml")
    assert completed(["--shard", "0", *argv], environment).goes_on == meant


def test_a_flag_that_may_have_a_value_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psrpc.options.config_keys.KEYS", frozenset({*KEYS, "goes_on"}))
    with pytest.raises(InvalidArgument, match="expected true or false or always or auto or never"):
        completed(["--shard", "0"], {"PSERVER_GOES_ON": "perhaps"})


def test_variables_that_kubernetes_adds_are_no_settings() -> None:
    for name in (
        "PSERVER_SERVICE_HOST",
        "PSERVER_SERVICE_PORT_GRPC",
        "PSERVER_PORT",
        "PSERVER_PORT_5000_TCP",
        "PSERVER_PORT_5000_TCP_ADDR",
        "PSERVER_SHARD_0_SERVICE_HOST",
        "PSERVER_SHARD_0_PORT",
    ):
        assert not is_a_setting(name), name
    assert all(is_a_setting(f"PSERVER_{key.upper()}") for key in KEYS)


def test_the_help_says_what_is_required_and_where_it_can_be_said() -> None:
    parser, _ = make()
    said = " ".join(parser.format_help().split())
    assert "its index; required, on the command line, or as PSERVER_SHARD, or as shard in" in said
    assert said.count("required") == 1


def test_show_config_prints_all_and_asks_for_nothing() -> None:
    parser, configuration = make()
    said = parser.parse_args(["--show-config", "--set", "a=b c"])
    lines = configuration.shown(said, {"PSERVER_RESUME": "1"}).splitlines()
    assert [line.split()[0] for line in lines] == [*configuration.settings(said, {}), "config"]
    shown = [" ".join(line.split()) for line in lines]
    assert "shard - missing" in shown
    assert "resume true environment (PSERVER_RESUME)" in shown
    assert "set 'a=b c' command line (--set)" in shown
    assert "config - default" in shown


def test_show_config_names_the_file_and_the_source_of_its_name(tmp_path: Path) -> None:
    named, said = tmp_path / "named.toml", tmp_path / "said.toml"
    for path in (named, said):
        path.write_text(f'[pserver]\ngpu = "{path.stem}"\n')
    parser, configuration = make()

    def shown(*argv: str) -> list[str]:
        arguments = parser.parse_args(["--show-config", *argv])
        text = configuration.shown(arguments, {"PSERVER_CONFIG": str(named)})
        return [" ".join(line.split()) for line in text.splitlines()]

    assert f"config {named} environment (PSERVER_CONFIG)" in shown()
    assert f"gpu named file ({named} [pserver])" in shown()
    assert f"config {said} command line (--config)" in shown("--config", str(said))
    assert f"gpu said file ({said} [pserver])" in shown("--config", str(said))


def test_where_a_setting_was_said_is_kept_for_messages(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[common]\ncerts = "certs"\n')
    environment = {"PSERVER_INSECURE": "0", "PSERVER_CONFIG": str(file)}
    said = completed(["--shard", "0"], environment)
    assert said.elsewhere == {"insecure": "PSERVER_INSECURE", "certs": f"{file} [common]"}


def test_the_file_of_a_token_is_shown_and_not_its_content(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    parser = argparse.ArgumentParser()
    configuration = Configuration(parser, "worker", WorkerOptions)
    said = parser.parse_args(["--show-config"])
    shown = configuration.shown(said, {"PSERVER_TOKEN_FILE": str(tmp_path / "token")})
    assert str(tmp_path / "token") in shown
    assert "s3cret" not in shown


def test_help_says_the_defaults() -> None:
    assert "default: None, 100%" in make()[0].format_help()


@pytest.mark.parametrize("variable", ["PSERVER_SHARDS", "TF_CONFIG"])
def test_processes_of_up_get_all_options_on_their_command_line(variable: str) -> None:
    from coordinator.launch.commands import UpOptions, cluster

    options = UpOptions("job.py", shards=1, workers=1, run_dir=Path("run"))
    started = cluster(options, {**os.environ, variable: "5", "PATH": "/bin"}, 1, "127.0.0.1:1")
    for command in (started.coordinator, *started.members.values()):
        assert variable not in command.environment
        assert command.environment["PATH"] == "/bin"
