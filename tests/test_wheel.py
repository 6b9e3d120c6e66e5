"""The wheel, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        (sys.executable, "-P", "-c", IMPORT_ALL, str(there)),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sources = {path for role in PACKAGES for path in (ROOT / role).rglob("*.py")}
    own = [path for path in sources if path.name != "__main__.py"]
    assert int(done.stdout) == len(own) - len(PACKAGES)
