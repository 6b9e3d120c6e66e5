"""The wheel, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psrpc.ops.extras import TF_MODULES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("psrpc", "pserver", "worker", "coordinator")

IMPORT_ALL = f"""
import importlib, pkgutil, sys
from pathlib import Path
packages = {PACKAGES!r}
count = 0
for package in packages:
    module = importlib.import_module(package)
    assert str(Path(module.__file__).parents[1]) == sys.argv[1], module.__file__
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            count += 1
from coordinator.dashboard.app import WEB
assert (WEB / "index.html").exists() and list((WEB / "vendor").iterdir())
print(count)
"""

WITHOUT_EXTRAS = f"""
import importlib, pkgutil, sys
for name in {sorted(TF_MODULES | {"tensorboard", "fsspec", "s3fs", "opentelemetry"})!r}:
    sys.modules[name] = None
failed = []
for package in {PACKAGES!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            failed.append((found.name, error.name))
for name, missing in failed:
    assert missing in {sorted(TF_MODULES)!r}, (name, missing)
    assert name.startswith(("worker.", "pserver.updates.keras_")), (name, missing)
print(len(failed))
"""
"""Every module but those of workers and of the Keras engine imports without an extra."""


@pytest.mark.slow
def test_every_module_of_the_wheel_is_there(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), ".")
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    subprocess.run((*pip, *build), cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    there = tmp_path / "installed"
    subprocess.run((*pip, "install", "--no-deps", "--target", str(there), str(wheel)), check=True)
    environment = {**os.environ, "PYTHONPATH": str(there), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = imported(IMPORT_ALL, there, environment)
    sources = {path for role in PACKAGES for path in (ROOT / role).rglob("*.py")}
    own = [path for path in sources if path.name != "__main__.py"]
    assert int(done.stdout) == len(own) - len(PACKAGES)
    # A worker runs nowhere without TensorFlow.
    assert int(imported(WITHOUT_EXTRAS, there, environment).stdout) > 3


def imported(
    code: str, there: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` away from the checkout, with the packages in ``there``."""
    done = subprocess.run(
        (sys.executable, "-P", "-c", code, str(there)),
        cwd=there.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
