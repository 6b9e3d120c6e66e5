from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floor import loopback_ms, memcpy_ms
from benchmarks.peers import Figure, read_figure, run_peer
from benchmarks.report import replace_section


def test_a_peer_runs_its_script_for_the_case(tmp_path: Path) -> None:
    (tmp_path / "ray_ps.py").write_text(
        "import json, sys\n"
        "print('starting up')\n"
        "print(json.dumps({'peer': 'ray', 'workload': sys.argv[1], 'ms': 7.25}))\n"
    )
    assert run_peer(tmp_path, "ray", "dense_16x4MB") == Figure(7.25)


def test_an_absent_script_is_a_miss(tmp_path: Path) -> None:
    assert run_peer(tmp_path, "tf", "dense_16x4MB").miss == f"no tf_ps.py in {tmp_path}"


def test_an_absent_package_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "torch_rpc.py").write_text("import no_such_package\n")
    found = run_peer(tmp_path, "torch", "dense_16x4MB")
    assert found == Figure(miss="ModuleNotFoundError: No module named 'no_such_package'")


@pytest.mark.parametrize(
    ("stdout", "stderr", "expected"),
    [
        ('{"workload": "a", "ms": 2, "steps_per_s": 500.0}\n', "noise", Figure(2.0, 500.0)),
        ('{"workload": "b", "ms": 2}\n[1]\n3\n{"workload": "a", "ms": 4}', "", Figure(4.0)),
        ('{"workload": "b", "ms": 2}\n', "first\nlast\n\n", Figure(miss="last")),
        ("", "", Figure(miss="it printed no result")),
    ],
)
def test_the_figure_is_that_of_the_case(stdout: str, stderr: str, expected: Figure) -> None:
    assert read_figure(stdout, stderr, "a") == expected


def test_the_floors_move_the_bytes() -> None:
    assert memcpy_ms(1 << 12) > 0
    assert loopback_ms(1 << 12) > 0


def test_a_section_is_replaced_and_nothing_else() -> None:
    page = "a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n<!-- sweep -->\n<!-- /sweep -->\n"
    once = replace_section(page, "bench", "new\n")
    assert once == page.replace("old\n", "\nnew\n\n")
    assert replace_section(once, "bench", "new") == once
    with pytest.raises(ValueError, match="no markers <!-- memory -->"):
        replace_section(page, "memory", "new")
