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
