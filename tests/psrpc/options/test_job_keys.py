"""Settings that are typed as options, and the list of them beside the job's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.options.job_keys import CODE, FIELDS, WHOLE_NUMBERS, own_settings, setting_meant
from worker.job import overrides


def test_the_list_is_that_of_the_fields_that_text_can_express() -> None:
    assert {name for name, kind in overrides.FIELDS.items() if kind} == set(FIELDS)
    assert {name for name, kind in overrides.FIELDS.items() if not kind} == CODE
    expected = {name: kind.expected for name, kind in overrides.FIELDS.items() if kind}
    assert {name for name, said in expected.items() if said == "a whole number"} == WHOLE_NUMBERS


@pytest.mark.parametrize(
    ("words", "exactly", "meant"),
    [
        (["job.py", "--epochs", "3"], True, "epochs=3"),
        (["--epochs", "3", "job.py"], False, "epochs=3"),
        (["--epochs=3"], True, "epochs=3"),
        (["--batch-size", "-5"], True, "batch_size=VALUE"),
        (["--speculate"], True, "speculate=VALUE"),
        (["--optimizer.learning_rate=1"], True, "optimizer.learning_rate=1"),
        (["--epoch", "3"], True, ""),
        (["--epoch", "3"], False, "epochs=3"),
        (["--model", "x"], True, ""),
        (["--records", "7", "own.py"], True, "records=7"),
        (["--records", "7", "--job=own.py"], True, "records=7"),
        (["--records", "7", "broken.py"], True, ""),
        (["--records", "7", "gone.py"], True, ""),
    ],
)
def test_the_setting_that_an_option_means(
    words: list[str],
    exactly: bool,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("import worker\nn = worker.setting('records', 5)\n")
    Path("broken.py").write_text("n = setting('records', 5\n")
    flag = next(word for word in words if word.startswith("--") and "job" not in word)
    assert setting_meant(words, flag, exactly=exactly) == meant


def test_own_settings_are_found_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("raise SystemExit\na = setting('a', 1)\nb = setting(name, 2)\nsetting()\n")
    assert own_settings(file) == {"a"}
