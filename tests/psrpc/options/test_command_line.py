from __future__ import annotations

import pytest

from tests.mistakes.commands import say
from tests.test_help import ALL


@pytest.mark.parametrize(
    ("program", "command"), [(program, tuple(said)) for program in ALL for said in ALL[program]]
)
def test_every_command_refuses_with_a_code(
    program: str, command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    said = say(capfd, program, *command, "--no-such-option")
    assert (said.code, said.status) == ("PS113", 2), said.everything
    assert said.message.startswith(" ".join([program, *command]) + ": ")


def test_an_option_is_said_in_full(capfd: pytest.CaptureFixture[str]) -> None:
    """``--shard``, which is another command's, is not short for ``--shards``."""
    said = say(capfd, "coordinator", "serve", "--job", "job.py", "--shard", "2")
    assert (said.code, said.status) == ("PS113", 2), said.everything
    assert "did you mean '--shards'?" in said.message
