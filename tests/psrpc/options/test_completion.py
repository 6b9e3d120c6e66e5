from __future__ import annotations

import shutil
import subprocess

import pytest

import coordinator.cli.__main__
import pserver.cli.__main__
import worker.cli.__main__
from psrpc.options.command_line import script

PARSERS = {
    "coordinator": coordinator.cli.__main__.make_parser,
    "pserver": pserver.cli.__main__.make_parser,
    "worker": worker.cli.__main__.make_parser,
}


@pytest.mark.parametrize(
    ("program", "words", "offered"),
    [
        ("coordinator", ["sta"], "status"),
        ("coordinator", ["checkpoint", "ver"], "verify"),
        ("coordinator", ["serve", "--resume", "au"], "auto"),
        ("pserver", ["serve", "--met"], "--metrics"),
        ("worker", ["run", "--log-format", "js"], "json"),
    ],
)
def test_bash_completes(program: str, words: list[str], offered: str) -> None:
    """As bash does it: the words so far, and the number of the one that is being written."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    asked = (
        f"COMP_WORDS=({program} {' '.join(words)}); COMP_CWORD={len(words)}; "
        f'_shtab_{program}; echo "${{COMPREPLY[@]}}"'
    )
    text = f"{script(PARSERS[program](), 'bash')}\n{asked}\n"
    done = subprocess.run(
        [bash, "--norc"], input=text, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == [offered], done


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinator.cli.__main__.main(["completion", "zsh"]) == 0
    assert pserver.cli.__main__.run(["completion", "bash"]) == 0
    assert worker.cli.__main__.run(["completion", "bash"]) == 0
    said = capsys.readouterr().out
    assert "#compdef coordinator" in said
    assert "_shtab_pserver" in said
    assert "_shtab_worker" in said
