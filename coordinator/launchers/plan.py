"""A cluster for an engine to start: the options of its launcher, and the arguments of each role."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.policy import MODES
from psrpc.options.declaration import SHARDS, gpu_choice, natural, option, positive, run_path
from psrpc.options.job_source import look_at_settings
from psrpc.options.settings import GPUS, SecurityOptions

_LAST_PORT = 65_535
_FIRST_PORT, _PORTS = 20_000, 10_000
"""The range of default ports: below the ports that Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(SecurityOptions):
    """The options of every launcher."""

    run_dir: Path = option(
        "a directory that all nodes see; the same command again goes on with its run",
        convert=run_path,
    )
    shards: int = option(SHARDS, 1, metavar="K", convert=natural)
    workers: int = option("default: 1", 1, metavar="N", convert=positive)
    mode: str | None = option("overrides the job's mode", None, choices=MODES)
    replicas: int | None = option("sync: micro-batches of one round", None, metavar="K")
    overrides: tuple[str, ...] = option(
        "override a field of the job; may be repeated", (), flag="--set", metavar="KEY=VALUE"
    )
    gpu: str = option("for the workers; default: auto", "auto", convert=gpu_choice, metavar=GPUS)
    connect_timeout_s: float = option(
        "how long processes look for each other; default: 300",
        300.0,
        flag="--connect-timeout",
        metavar="SECONDS",
    )
    port: int | None = option(
        "where the coordinator listens; default: follows from the run directory",
        None,
        metavar="PORT",
        convert=positive,
    )


@dataclass(frozen=True)
class LaunchPlan:
    """A cluster to start: the job file, and the options of its launcher; paths are absolute.

    The arguments of a role lack only what the engine knows: addresses, and the index of a shard.
    """

    job: Path
    options: ClusterOptions

    @property
    def tasks(self) -> int:
        """The number of processes."""
        return 1 + self.options.shards + self.options.workers

    @property
    def port(self) -> int:
        """The coordinator's port. The default depends on the run directory alone, so that each
        start has the same."""
        chosen = self.options.port
        path = os.fsencode(self.options.run_dir)
        return _FIRST_PORT + zlib.crc32(path) % _PORTS if chosen is None else chosen

    @property
    def coordinator(self) -> list[str]:
        """The arguments of ``coordinator serve``."""
        options = self.options
        said = ["serve", "--job", str(self.job), "--shards", str(options.shards)]
        said += ["--run-dir", str(options.run_dir), "--resume", "auto"]
        if options.mode is not None:
            said += ["--mode", options.mode]
        if options.replicas is not None:
            said += ["--replicas", str(options.replicas)]
        for override in options.overrides:
            said += ["--set", override]
        return said + self._security

    @property
    def shard(self) -> list[str]:
        """The arguments of ``pserver serve``."""
        return ["serve", "--run-dir", str(self.options.run_dir), *self._member]

    @property
    def worker(self) -> list[str]:
        """The arguments of ``worker run``."""
        return ["run", "--job", str(self.job), "--gpu", self.options.gpu, *self._member]

    @property
    def _member(self) -> list[str]:
        return ["--connect-timeout", f"{self.options.connect_timeout_s:g}", *self._security]

    @property
    def _security(self) -> list[str]:
        options = self.options
        said = ["--certs", str(options.certs)] if options.certs else []
        if options.token_file:
            said += ["--token-file", str(options.token_file)]
        return said + ["--insecure"] * options.insecure


def plan_of(job: Path, options: ClusterOptions, *, elsewhere: bool = False) -> LaunchPlan:
    """Checks the options as far as this machine can; returns the plan.

    Args:
        elsewhere: the job file is not on this machine, but in an image.

    Raises:
        InvalidJob: there is no such job file.
        UserCodeFailed: the job file is not valid Python.
        InvalidSetting: ``--set`` has no key or no value, or a key that the job does not have.
        InvalidArgument: the port or the certificates cannot be used, or the options have neither
            certificates nor ``insecure``; names the options.
    """
    if not (elsewhere or job.is_file()):
        raise InvalidJob(f"there is no job file {str(job)!r}", code="PS102")
    if not elsewhere:
        look_at_settings(job, options.overrides)
    if options.port is not None and options.port > _LAST_PORT:
        raise InvalidArgument(f"--port is {options.port}; expected 1 to {_LAST_PORT}")
    if options.certs and options.insecure:
        raise InvalidArgument("--certs and --insecure exclude each other; leave one out")
    if options.certs and not (options.certs / "ca.crt").is_file():
        raise InvalidArgument(
            f"--certs is {str(options.certs)!r}, which has no ca.crt; make certificates: "
            f"coordinator certs init {options.certs}"
        )
    if not (options.certs or options.insecure):
        raise InvalidArgument(
            "a cluster on several machines needs --certs DIR (coordinator certs init DIR makes "
            "them), or --insecure where everybody on the network may change the model"
        )
    # Other machines read the plan, in directories of their own.
    certs, token = options.certs and options.certs.absolute(), options.token_file
    options = replace(options, certs=certs, token_file=token and token.absolute())
    return LaunchPlan(job if elsewhere else job.absolute(), options)
