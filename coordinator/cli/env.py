"""``coordinator env``: prints the facts about this machine that a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from psrpc import SOFTWARE
from psrpc.core.document import anything, mapped
from psrpc.core.errors import InvalidArgument
from psrpc.core.names import JOB
from psrpc.core.text import HIDDEN, document_without_secrets, is_secret_name, without_secrets
from psrpc.files.storage import cause_of, read_json
from psrpc.options.declaration import run_path

PACKAGES = (
    "tensorflow",
    "keras",
    "numpy",
    "grpcio",
    "grpcio-health-checking",
    "protobuf",
    "cryptography",
    "safetensors",
    "ml_dtypes",
    "structlog",
    "rich",
    "tensorboard",
    "prometheus_client",
    "opentelemetry-sdk",
)

VARIABLES = ("PSERVER_", "TF_", "GRPC_", "CUDA_", "XLA_", "KERAS_", "MALLOC_", "OMP_")
"""Prefixes of environment variables that change behaviour."""

GPU_S = 10.0
"""How long the driver may take to answer."""

OMITTED = HIDDEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the options of ``coordinator env``."""
    parser.description = "Shows versions, packages and devices for a bug report, and no secrets."
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--run-dir", type=run_path, metavar="DIR", help="show also what this run was started with"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0.

    Raises:
        InvalidArgument: ``--run-dir`` holds no run.
    """
    found = describe_environment(os.environ)
    if args.run_dir is not None:
        found["run"] = _run(args.run_dir)
    sys.stdout.write(
        (json.dumps(found, indent=1) if args.json else environment_as_text(found)) + "\n"
    )
    return 0


def describe_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns versions, machine, packages, devices and settings, as plain JSON types. Does not
    import TensorFlow, which takes seconds and may itself be broken."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "version": SOFTWARE,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": _gpus(),
        "environment": settings(environment),
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change behaviour, without the values of secrets."""
    return {
        name: OMITTED if is_secret_name(name) else without_secrets(value)
        for name, value in sorted(environment.items())
        if name.startswith(VARIABLES)
    }


def environment_as_text(found: Mapping[str, Any]) -> str:
    """Returns a line for each fact."""
    lines = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:" if value else f"{name}: none")
            lines += [f"  {key}: {entry}" for key, entry in value.items()]
        elif isinstance(value, list):
            lines.append(f"{name}: {', '.join(value) or 'none'}")
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    """Returns the GPUs that the driver knows; TensorFlow may see fewer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {error}"]
    if asked.returncode:
        return [f"nvidia-smi: {(asked.stdout or asked.stderr).strip()[:200]}"]
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def _run(run_dir: Path) -> dict[str, Any]:
    try:
        document = mapped(anything)(read_json(run_dir / JOB), "")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{run_dir} does not say what it was started with ({JOB}: {cause_of(error)}); expected "
            "the directory of a run",
            code="PS125",
        ) from None
    # Without the description, which holds the whole model; the options say more in less.
    options = {key: value for key, value in document.items() if key != "description"}
    shown: dict[str, Any] = document_without_secrets(options)
    return shown
