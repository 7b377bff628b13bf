# ruff: noqa: INP001 -- Sphinx executes this file
"""How the pages of this folder become a site: `nox -s docs`.

Knows what Sphinx needs to be told. What the pages say, and that their examples run, is elsewhere: in
the pages, and in tests/test_docs.py.
"""

import importlib
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PACKAGES = ("kvblocks", "kvkernels", "kvruntime")

project = "PagedAttention in three packages"
author = "The authors of kvblocks, kvkernels and kvruntime"
copyright = author  # noqa: A001 -- the name that Sphinx reads
html_title = "kvblocks · kvkernels · kvruntime"
html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# Two packages have a `Request` each; where a signature says no more, the nearer one is linked.
suppress_warnings = ["ref.python"]
myst_heading_anchors = 3

# Docstrings mark code as Markdown does.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Types as the source spells them, and one argument a line where a signature is long.
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 110
python_use_unqualified_type_names = True
add_module_names = False


def find_type(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Node
) -> nodes.Node | None:
    """Link what a signature names to where it is documented, wherever it was defined.

    A public name of ours must be there. Names of Python, of libraries and of our own that are not
    public stay text.
    """
    if node["refdomain"] != "py":
        return None
    package, _, name = node["reftarget"].rpartition(".")
    package = package.partition(".")[0]
    domain = env.domains.python_domain
    is_public = False
    for root in (package,) if package else PACKAGES:
        if root in PACKAGES and name in importlib.import_module(root).__all__:
            is_public = True
            if (target := f"{root}.{name}") in domain.objects:
                builder, origin = app.builder, node["refdoc"]
                return domain.resolve_xref(env, origin, builder, "obj", target, node, contnode)
    return None if is_public else contnode


def skip_tuple_fields(_app: Sphinx, _what: str, _name: str, obj: Any, *_: Any) -> bool | None:
    """Leave out what says only that a field of a tuple is a field of a tuple."""
    doc = getattr(obj, "__doc__", None) or ""
    return True if doc.startswith("Alias for field number") else None


def keep_sentences(
    _app: Sphinx, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Put sentences with a colon together again, of which napoleon took the beginning for a type."""
    for number, line in enumerate(lines):
        if what == "property" and line.startswith(":type: "):
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            lines[number] = ""


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("missing-reference", find_type)
    app.connect("autodoc-process-docstring", keep_sentences, priority=900)
    app.connect("autodoc-skip-member", skip_tuple_fields)
