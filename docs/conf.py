# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `make docs`. Its source directory is the repository, so that links work there and here."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from paceline import __version__  # noqa: E402

project = "paceline"
author = copyright = "The paceline authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "front",
    "recipe_pages",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**",
    "examples/**/README.md",
    "records/*/README.md",
]
exclude_patterns = ["docs/_ext/**", "docs/_static/**", "docs/recipes/_overview.md"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True  # a reference to nothing fails the build
nitpick_ignore_regex = [("py:.*", ".*")]  # but in signatures, which name classes of other packages

default_role = "code"  # of `words` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # the signature has them

html_theme = "furo"
html_title = f"paceline {release}"
html_static_path = ["_static"]
html_favicon = "_static/mark.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

# A copy of a console block is what was typed: no prompts, no output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
