"""``docs/job-fields.md`` is made from the source of ``pserver.Job``: ``make job-fields``."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from textwrap import TextWrapper

import pytest

from psrpc.options.job_keys import CODE
from tests.test_architecture import ROOT

PAGE = ROOT / "docs" / "job-fields.md"
SOURCES = (
    "worker/job/job.py",
    "psrpc/core/policy.py",
    "psrpc/checkpoint/checkpoint_every.py",
    "psrpc/core/tables.py",
)
"""``Job``, and where the types and constants of its fields are defined."""


def definitions() -> dict[str, ast.expr]:
    """Constants and type aliases at the top of the sources, by name."""
    found: dict[str, ast.expr] = {}
    for source in SOURCES:
        for node in ast.parse((ROOT / source).read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found[ast.unparse(node.target)] = node.value
    return found


def job_class() -> ast.ClassDef:
    tree = ast.parse((ROOT / SOURCES[0]).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Job"]
    return found


def texts(job: ast.ClassDef) -> dict[str, str]:
    """The docstring's text for each attribute, on one line each."""
    docstring = inspect.cleandoc(ast.get_docstring(job, clean=False) or "")
    attributes = docstring.partition("Attributes:\n")[2].partition("\n\nRaises:")[0]
    parts = re.split(r"^    (\w+): ", attributes, flags=re.MULTILINE)
    return {
        name: markdown(" ".join(text.split()))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def markdown(text: str) -> str:
    """Without the roles and double backticks of docstrings, and with links to pages."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def first_sentence(text: str) -> str:
    """Up to the first full stop that a capital follows."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`\[])", text)[0].rstrip(".") + "."


def shown_type(annotation: ast.expr, known: dict[str, ast.expr]) -> str:
    """The type with aliases in full, as one reads it in a table."""
    match annotation:
        case ast.Name(id=name) if name in known:
            return shown_type(known[name], known)
        case ast.Constant(value=str(quoted)):
            return shown_type(ast.parse(quoted, mode="eval").body, known)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{shown_type(left, known)} | {shown_type(right, known)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            return " | ".join(ast.unparse(choice).replace("'", '"') for choice in choices)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choice):
            return ast.unparse(choice).replace("'", '"')
        case ast.Subscript(value=value, slice=ast.Tuple(elts=arguments)) if not isinstance(
            arguments[0], ast.List
        ):
            inner = ", ".join(shown_type(argument, known) for argument in arguments)
            return f"{ast.unparse(value)}[{inner}]"
        case ast.Subscript(value=value, slice=ast.Name() as argument):
            return f"{ast.unparse(value)}[{shown_type(argument, known)}]"
    return ast.unparse(annotation)


def document() -> str:
    """The whole page."""
    job, known = job_class(), definitions()
    said = texts(job)
    rows, sections = [], []
    wrapper = TextWrapper(100, break_on_hyphens=False, break_long_words=False)
    for field in job.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name, default = ast.unparse(field.target), field.value
        while isinstance(default, ast.Name):
            default = known[default.id]
        value = "required" if default is None else f"`{ast.unparse(default)}`".replace("'", '"')
        line = first_sentence(said[name])
        kind = shown_type(field.annotation, known).replace("|", r"\|")
        shown = f"`{name}`"
        if said[name].rstrip(".") != line.rstrip("."):
            shown = f"[`{name}`](#{name})"
            sections.append(f"### {name}\n\n{wrapper.fill(said[name])}\n")
        rows.append(f"| {shown} | `{kind}` | {value} | {line.replace('|', chr(92) + '|')} |")
    code = ", ".join(f"`{name}`" for name in sorted(CODE))
    return HEAD.format(code=code) + "\n".join(rows) + "\n\n## In full\n\n" + "\n".join(sections)


HEAD = """\
# Fields of a job

`make job-fields` makes this page from the docstring of `pserver.Job`. [jobs.md](jobs.md) shows how
to write a job, [consistency.md](consistency.md) explains the fields from `mode` to `warmup_epochs`.

`--set FIELD=VALUE` overrides a field, `--set optimizer.ARGUMENT=VALUE` an argument of the
optimizer; `none` stands for `None`. The fields {code}
are code or data and cannot be overridden.

| field | type | default | meaning |
| --- | --- | --- | --- |
"""


def test_every_field_is_described() -> None:
    job = job_class()
    names = [ast.unparse(each.target) for each in job.body if isinstance(each, ast.AnnAssign)]
    assert sorted(texts(job)) == sorted(names)


def test_the_page_is_up_to_date(pytestconfig: pytest.Config) -> None:
    report: Path | None = pytestconfig.getoption("--report")
    if report is not None:
        report.write_text(document())
    assert PAGE.read_text() == document(), "docs/job-fields.md is out of date: make job-fields"
