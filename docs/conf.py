"""How Sphinx builds the site: `make docs`. Pages are Markdown; the API reference comes from the docstrings."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import aggregations  # noqa: E402 - from here
import jobs  # noqa: E402
import persistence  # noqa: E402

for package in (aggregations, jobs, persistence):  # a lazy import is not seen
    for name in package.__all__:
        getattr(package, name)

project = "headwater"
author = "The headwater maintainers"
copyright = author  # noqa: A001 - Sphinx' name
version = release = version_of("headwater")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["extensions"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]  # types in signatures: most are of other packages

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]

default_role = "literal"  # the docstrings' backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"headwater {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False
