"""Sphinx's settings for the documentation site: ``make docs``.

The source folder is the repository, so that a link means the same in the site as in a checkout.
``docs/README.md`` is the index and gives the navigation: each of its headings is a part, and the
pages that the table below it links to are the pages of that part, in this order.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pserver

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
INDEX = "docs/README"
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s#:]+)\)")

project = html_title = "tf-pserver"
language = "en"
root_doc = INDEX
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 6
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True
add_module_names = False

# Furo brings scripts and both colour schemes along, and takes fonts of the reader's system.
html_theme = "furo"
html_static_path: list[str] = []
html_copy_source = False
html_show_sourcelink = False


def navigation(index: str) -> str:
    """The hidden tables of contents of the index, one for each heading with a table of pages."""
    blocks = []
    parts = re.split(r"^##+ (.+)$", index, flags=re.MULTILINE)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        linked = re.findall(r"^\| \[[^\]]*\]\(([^)#]+\.md)\)", text, flags=re.MULTILINE)
        pages = [f"/docs/{path}" for path in linked]
        block = ["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"]
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def prepare_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the navigation to the index, and turns links to folders into text: a site has none."""
    folder = (ROOT / page).parent

    def without_folder(match: re.Match[str]) -> str:
        return match[1] if (folder / match[2]).is_dir() else match[0]

    source[0] = LINK.sub(without_folder, source[0])
    if page == INDEX:
        source[0] += "\n\n" + navigation(source[0])


def link_pages(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Turns ``docs/fit.md`` in a docstring into a link."""
    lines[:] = [re.sub(r"`*\bdocs/([\w/-]+)\.md\b`*", r":doc:`/docs/\1`", line) for line in lines]


def show_init(
    _app: Sphinx, what: str, _name: str, obj: Any, _options: Any, given: str | None, returned: Any
) -> tuple[str, Any] | None:
    """Shows the arguments of a Keras layer, whose ``__new__`` hides them."""
    if what != "class" or given != "(*args, **kwargs)":
        return None
    _self, *own = inspect.signature(obj.__init__).parameters.values()
    return str(inspect.Signature(own)), returned


def find_public(
    app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.Element
) -> nodes.Element | None:
    """Leads a reference to the module that defines a name to the name that users import."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in pserver.__all__:
        return None
    python = env.domains.python_domain
    at = node.get("refdoc", INDEX)
    return python.resolve_xref(env, at, app.builder, "obj", f"pserver.{name}", node, content)


def write_entrance(app: Sphinx, failure: Exception | None) -> None:
    """Makes ``index.html`` lead to the index."""
    if failure is None and app.builder.format == "html":
        to = app.builder.get_target_uri(INDEX)
        page = f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{to}</a>'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{page}\n")


def setup(app: Sphinx) -> None:
    """Connects the above to Sphinx's events."""
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", show_init)
    app.connect("missing-reference", find_public)
    app.connect("build-finished", write_entrance)
