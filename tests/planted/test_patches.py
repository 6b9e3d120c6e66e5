"""Every planted bug still fits the source; whether it is caught is for ``make planted``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted.patches import ROOT, BadPatch, Planted, all_planted, apply, read, rebase

PLANTED = all_planted()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_fits_the_source_and_changes_its_code(planted: Planted, tmp_path: Path) -> None:
    before = {path: (ROOT / path).read_text() for path in planted.paths}
    for path, text in before.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    apply(planted, tmp_path)
    changed = [path for path in before if code(before[path]) != code((tmp_path / path).read_text())]
    assert changed, "it fits a docstring"


def code(source: str) -> str:
    """The syntax of ``source`` without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_names_catchers_that_exist(planted: Planted) -> None:
    for catcher in planted.catchers:
        if catcher.startswith("sim "):
            *flags, seeds = catcher.split()[1:]
            assert set(flags) <= {"--allreduce", "--attended", "--sums"}
            first, _, last = seeds.partition("..")
            assert int(first) < int(last)
            continue
        file, *names = catcher.split()[0].split("::")
        tree = ast.parse((ROOT / file).read_text())
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert {name.partition("[")[0] for name in names} <= defined


def test_a_patch_without_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.patch").write_text("--- a/x\n+++ b/x\n")
    with pytest.raises(BadPatch, match="Breaks"):
        read(tmp_path / "x.patch")


def test_a_patch_is_written_anew_while_the_lines_that_it_takes_out_are_there(
    tmp_path: Path,
) -> None:
    head = "Breaks: A rule.\nCaught by: tests/x.py\n\n--- a/x\n+++ b/x\n"
    patch, source = tmp_path / "x.patch", tmp_path / "x"
    patch.write_text(f"{head}@@ -1,3 +1,2 @@\n before\n-checked\n after\n")
    source.write_text("new\nchanged\nchecked\nafter\n")
    with pytest.raises(BadPatch, match="does not fit"):
        apply(read(patch), tmp_path)
    rebase(read(patch), tmp_path)
    assert patch.read_text() == f"{head}@@ -2,3 +2,2 @@\n changed\n-checked\n after\n"
    assert "checked" in source.read_text()
    source.write_text("gone\n")
    with pytest.raises(BadPatch, match="does not fit"):
        rebase(read(patch), tmp_path)
