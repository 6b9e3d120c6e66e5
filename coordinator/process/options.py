"""Options of ``coordinator serve``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from coordinator.dashboard.options import DEFAULT_PORT as DASHBOARD_PORT
from psrpc.core.errors import InvalidArgument
from psrpc.metrics.address import OFF
from psrpc.net.channel import parse_address
from psrpc.options.security_options import from_arguments
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``coordinator serve``; None leaves a choice to the job.

    Raises:
        InvalidArgument: an invalid value; names the option and the value.
    """

    job: Path
    shards: int = 1
    bind: str = "127.0.0.1:5000"
    run_dir: Path | None = None
    mode: str | None = None
    replicas: int | None = None
    overrides: tuple[str, ...] = ()
    resume: bool = False
    auto_resume: bool = False
    dashboard: str | None = None
    security: Security = PLAINTEXT
    metrics: str = OFF
    reflection: bool = False

    def __post_init__(self) -> None:
        for name, value in (("shards", self.shards), ("replicas", self.replicas)):
            if value is not None and value < 1:
                raise InvalidArgument(f"--{name} is {value}; expected a whole number of at least 1")
        parse_address(self.bind, default_port=5000)
        if self.dashboard is not None:
            parse_address(self.dashboard, default_port=DASHBOARD_PORT)


def options_from(args: argparse.Namespace) -> ServeOptions:
    """Returns the checked options. Raises InvalidArgument."""
    return ServeOptions(
        job=args.job,
        shards=args.shards,
        bind=args.bind,
        run_dir=args.run_dir,
        mode=args.mode,
        replicas=args.replicas,
        overrides=tuple(args.overrides),
        resume=args.resume == "always",
        auto_resume=args.resume == "auto",
        dashboard=args.dashboard,
        security=from_arguments(Role.COORDINATOR, args),
        metrics=args.metrics,
        reflection=args.reflection,
    )
