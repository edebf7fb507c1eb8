# SPDX-License-Identifier: Apache-2.0
"""Equations in docstrings of modules are indented, as one reads them in the source; here they become literal blocks."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def keep_equations(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put `::` before what is indented in a module's docstring."""
    if what != "module":
        return
    found: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        blank = not line.strip()
        if indented and not inside and not lines[number - 1].strip():
            said = next((text for text in reversed(found) if text.strip()), "")
            if not said.rstrip().endswith("::"):
                found += ["::", ""]
        inside = indented or (inside and blank)
        found.append(line if inside else _without_substitutions(line))
    lines[:] = found


def _without_substitutions(line: str) -> str:
    """A norm such as |g|, outside of code, would be taken for the name of something."""
    parts = line.split("`")
    return "`".join(part if k % 2 else part.replace("|", r"\|") for k, part in enumerate(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", keep_equations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
