"""How Sphinx builds the site: `make docs`."""

import os
import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

import generated
from sphinx import addnodes

import subquad


os.environ["COLUMNS"] = "100"  # the width of the commands' help

project = "subquad"
author = "The authors of subquad"
copyright = "the authors of subquad"
version = release = subquad.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
]
exclude_patterns = ["_generated", "playground"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "subquad"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["subquad.css"]
html_extra_path = ["_generated/llms.txt"]
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "native"
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build/notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds; `.ci/run` executes them beside the tests
nb_merge_streams = True
nb_output_stderr = "remove"
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"


autodoc_typehints = "none"  # the docstrings say more than the annotations
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = napoleon_use_param = False
default_role = "code"

REFERENCE = re.compile(r"\[`([\w.]+)`\]")


def make_markup(app, what, name, obj, options, lines):
    """Docstrings write [`name`] for another object and indent equations, as in transformers."""
    out = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() and out and not out[-1].strip():
            before = next((other for other in reversed(out) if other.strip()), line)
            if indent > len(before) - len(before.lstrip()):
                out += ["::", ""] if indent <= 4 else [" " * (indent - 4) + "::", ""]
        out.append(REFERENCE.sub(r":py:obj:`\1`", line))
    lines[:] = out


def add_anchors(app, doctree):
    """
    An object of `subquad.hub.info` may be documented as `subquad.NAME`. The page of a module's source links back to
    all of its objects in one of the two ways, so each of them has an anchor for both.
    """
    for signature in doctree.findall(addnodes.desc_signature):
        name, module = signature.get("fullname"), signature.get("module")
        defined_in = getattr(getattr(subquad, name, None), "__module__", module) if name and module else ""
        if defined_in.startswith("subquad."):
            anchors = {f"{each}.{name}" for each in ("subquad", defined_in)}
            signature["ids"] += sorted(anchors.difference(signature["ids"]))


def setup(app):
    app.connect("autodoc-process-docstring", make_markup, priority=400)
    app.connect("doctree-read", add_anchors)
    generated.write(Path(app.srcdir) / "_generated")
