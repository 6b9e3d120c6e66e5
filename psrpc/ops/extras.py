"""The extras of this package: names what is missing or too old, and what installs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec

from psrpc.core.errors import InvalidJob

CODE = "PS135"

TF_MODULES = frozenset({"tensorflow", "keras", "h5py", "cloudpickle", "setproctitle"})
"""Modules that the extra ``tf`` installs."""

_DISTRIBUTION = "tf-pserver"
_TF = "tf"
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*?>=\s*([\d.]+)")


def install_command(extra: str) -> str:
    """Returns the command that installs ``extra``."""
    return f"pip install '{_DISTRIBUTION}[{extra}]'"


def missing(what: str, needs: str, extra: str, otherwise: str = "") -> InvalidJob:
    """Makes the error for ``what``, which ``needs`` a package of ``extra`` that is not installed.

    Args:
        otherwise: an alternative to the installation.
    """
    return InvalidJob(
        f"{what} needs {needs}, which is not installed in {sys.prefix}: {install_command(extra)}"
        + (f", or {otherwise}" if otherwise else ""),
        code=CODE,
    )


def check_tensorflow(what: str, otherwise: str = "") -> None:
    """Checks that ``what`` finds TensorFlow and Keras as the extra ``tf`` has them; imports
    neither.

    Raises:
        InvalidJob: one of them is missing, or older than this package supports.
    """
    _check(what, {"TensorFlow": "tensorflow", "Keras": "keras"}, _TF, otherwise)


def check_ray(what: str) -> None:
    """Checks that ``what`` finds Ray as the extra ``ray`` has it; does not import it.

    Raises:
        InvalidJob: it is missing, or older than this package supports.
    """
    _check(what, {"Ray": "ray"}, "ray")


def _check(what: str, modules: Mapping[str, str], extra: str, otherwise: str = "") -> None:
    for name, module in modules.items():
        if sys.modules.get(module) is None and find_spec(module) is None:
            raise missing(what, name, extra, otherwise)
    for module, least, found in _too_old(_requirements(), modules.values()):
        raise InvalidJob(
            f"{what} needs {module} {least} or newer; {found} is installed in {sys.prefix}: "
            f"{install_command(extra)}",
            code=CODE,
        )


def _requirements() -> list[str]:
    try:
        return metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # on the path, not installed
        return []


def _too_old(requirements: Iterable[str], names: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    """Yields name, least version and installed version of the distributions ``names`` that are
    older than ``requirements`` ask for. Other distributions of a module (tensorflow-cpu) pass."""
    least = {found[1]: found[2] for found in map(_REQUIREMENT.match, requirements) if found}
    for name in names:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name in least and _release(installed) < _release(least[name]):
            yield name, least[name], installed


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
