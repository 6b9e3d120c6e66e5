"""Options of ``coordinator serve``."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrpc.core.errors import InvalidArgument
from psrpc.net.channel import parse_address
from psrpc.options.security_options import from_arguments
from psrpc.options.settings import DASHBOARD_PORT, OFF, CoordinatorOptions
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role


@dataclass(frozen=True)
class ServeOptions(CoordinatorOptions):
    """The options of ``coordinator serve``, checked by the constructor.

    Attributes:
        metrics: HOST:PORT that serves Prometheus, or "off": the default here.

    Raises:
        InvalidArgument: an invalid value; names the option and the value.
    """

    metrics: str = field(default=OFF, kw_only=True)
    security: Security = field(default=PLAINTEXT, kw_only=True)

    @property
    def resume(self) -> bool:
        """Whether there must be an earlier run, which continues."""
        return self.resumption == "always"

    @property
    def auto_resume(self) -> bool:
        """Whether the state of the run decides if it begins or continues."""
        return self.resumption == "auto"

    def __post_init__(self) -> None:
        for name, value, least in (("shards", self.shards, 0), ("replicas", self.replicas, 1)):
            if value is not None and value < least:
                raise InvalidArgument(
                    f"--{name} is {value}; expected a whole number of at least {least}"
                )
        parse_address(self.bind, default_port=5000)
        if self.dashboard is not None:
            parse_address(self.dashboard, default_port=DASHBOARD_PORT)


def options_from(said: CoordinatorOptions) -> ServeOptions:
    """Returns the checked options with their credentials. Raises InvalidArgument."""
    return ServeOptions(**vars(said), security=from_arguments(Role.COORDINATOR, said))
