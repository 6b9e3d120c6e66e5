"""Secrets are not shown with the settings that hold them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from coordinator.cli import env as env_cli
from coordinator.cli.__main__ import main
from psrpc.core.text import HIDDEN, document_without_secrets, is_secret_name, without_secrets
from psrpc.options.config import Configuration
from psrpc.options.settings import CoordinatorOptions

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/path",
        f"https://{SECRET}@host",
        f"s3://user:a@{SECRET}@host/x",
        f"https://host/x?a=1&password={SECRET}&b=2",
        f"https://host/x?X-Amz-Signature={SECRET}",
        f"https://host/x?sv=1&sig={SECRET}",
        f"https://host/x#access_token={SECRET}",
        f"https://host/x?X-Amz-Credential={SECRET}",
        f"https://host/x?AWSAccessKeyId={SECRET}",
        f"setting.api_key={SECRET}",
        f"--set s3_password={SECRET} x",
    ],
)
def test_secrets_are_not_shown(text: str) -> None:
    shown = without_secrets(text)
    assert SECRET not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "text",
    [
        "https://host:80/path?epoch=3&size=4",
        "epochs=3",
        "token_file=/run/secrets/token",
        "user@host",
        "data/train-*.csv",
        "optimizer.learning_rate=0.1",
        "",
    ],
)
def test_texts_without_secrets_are_unchanged(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("DB_PASS", True),
        ("DB_PASSWORD", True),
        ("HTTP_AUTH", True),
        ("GRPC_AUTHORIZATION", True),
        ("X_SECRET_KEY", True),
        ("API_TOKENS", True),
        ("TF_KEY", True),
        ("PSERVER_TOKEN_FILE", False),
        ("PSERVER_CERTS", False),
        ("TF_CPP_MIN_LOG_LEVEL", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) == secret


def test_documents() -> None:
    found = document_without_secrets(
        {"a": [f"x_token={SECRET}", 3], "api_key": SECRET, "b": {"url": f"s3://u:{SECRET}@h"}}
    )
    assert SECRET not in json.dumps(found)
    assert (found["api_key"], found["a"][1]) == (HIDDEN, 3)


def test_env_hides_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "PSERVER_TRACE": f"http://u:{SECRET}@collector:4318/v1?token={SECRET}",
        "GRPC_AUTH": SECRET,
        "TF_PASS": SECRET,
    }
    shown = env_cli.settings(given)
    assert SECRET not in json.dumps(shown)
    assert shown["PSERVER_TRACE"] == "http://***@collector:4318/v1?token=***"
    (tmp_path / "job.json").write_text(
        json.dumps({"job": "job.py", "overrides": [f"setting.password={SECRET}"]})
    )
    assert main(["env", "--run-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "setting.password=***" in said
    assert SECRET not in said


def test_show_config_hides_them() -> None:
    parser = argparse.ArgumentParser()
    configuration = Configuration(parser, "coordinator", CoordinatorOptions)
    said = parser.parse_args(
        ["--show-config", "--trace", f"http://u:{SECRET}@h/", "--set", f"setting.token={SECRET}"]
    )
    shown = configuration.shown(said, {})
    assert SECRET not in shown
    assert "http://***@h/" in shown
