from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_generated_code_is_what_the_protos_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate_protos.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
