"""The options with which every command authenticates itself. Importing this module is fast."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from psrpc.core.errors import InvalidArgument
from psrpc.options.config import add_options
from psrpc.options.config_keys import check_key_names
from psrpc.options.declaration import NotThis, flag_from_text
from psrpc.options.settings import ListenerSecurityOptions, SecurityOptions
from psrpc.security.certificates import certificate_name
from psrpc.security.identity import Role

if TYPE_CHECKING:
    from psrpc.security.credentials import Security

CERTS_VARIABLE = "PSERVER_CERTS"
TOKEN_VARIABLE = "PSERVER_TOKEN_FILE"
INSECURE_VARIABLE = "PSERVER_INSECURE"

Arguments = argparse.Namespace | SecurityOptions
"""Parsed arguments, or the options of a command with a configuration."""


def add_security_arguments(parser: argparse.ArgumentParser, listens: bool) -> None:
    """Adds ``--certs``, ``--token-file`` and ``--insecure``, for a command without ``--config``.

    Args:
        listens: whether the command also listens.
    """
    declaring = ListenerSecurityOptions if listens else SecurityOptions
    add_options(parser, declaring)
    parser.set_defaults(**vars(declaring()))


def from_arguments(
    role: Role, args: Arguments, environment: Mapping[str, str] = os.environ
) -> Security:
    """Makes the credentials that the options of :func:`add_security_arguments` or the environment
    name.

    Raises:
        InvalidArgument: see :meth:`Security.from_options`; also if a variable is not a boolean, or
            if the environment has an unknown setting.
    """
    from psrpc.security.credentials import CredentialOptions, Security

    check_key_names(environment)
    return Security.from_options(
        role,
        certificates_directory(args, environment),
        token_path(args, environment),
        is_insecure(args, environment),
        CredentialOptions(
            _asked(args, "certs", CERTS_VARIABLE),
            _asked(args, "token_file", TOKEN_VARIABLE),
            _asked(args, "insecure", INSECURE_VARIABLE),
        ),
    )


def _asked(args: Arguments, key: str, variable: str) -> str:
    """Names the source of a setting for messages: ``--certs``, or ``--certs (PSERVER_CERTS)``."""
    flag = "--" + key.replace("_", "-")
    where = getattr(args, "elsewhere", {}).get(key, "") if getattr(args, key) else variable
    return f"{flag} ({where})" if where else flag


def certificates_directory(
    args: Arguments, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Returns the directory of certificates named by the options or else by the environment."""
    given: Path | None = args.certs
    return given if given or args.insecure else _path(environment, CERTS_VARIABLE)


def who_asks(
    args: Arguments,
    roles: Iterable[Role],
) -> Role:
    """Chooses the first of ``roles`` whose certificate exists, since many machines have the files
    of one role only; operator if none exists."""
    certs = certificates_directory(args)
    found = (role for role in roles if certs and (certs / certificate_name(role)).exists())
    return next(found, Role.OPERATOR)


def token_path(args: Arguments, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the token file named by the options or else by the environment."""
    given: Path | None = args.token_file
    return given if given or args.insecure else _path(environment, TOKEN_VARIABLE)


def is_insecure(args: Arguments, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the options, or else the environment, ask for plaintext. Raises InvalidArgument."""
    text = environment.get(INSECURE_VARIABLE, "")
    try:
        said = bool(text) and flag_from_text(text)
    except NotThis as expected:
        raise InvalidArgument(f"{INSECURE_VARIABLE}={text!r}; expected {expected}") from None
    # Options for certificates or a token override the variable.
    return bool(args.insecure) or (said and args.certs is None and args.token_file is None)


def _path(environment: Mapping[str, str], variable: str) -> Path | None:
    value = environment.get(variable, "")
    return Path(value) if value else None
