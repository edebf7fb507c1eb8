# SPDX-License-Identifier: Apache-2.0
"""The site's sources are the whole repository, so its front page lies in docs/; index.html at the top leads there."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="refresh" content="0; url={target}"><link rel="canonical" href="{target}"></head>
<body><a href="{target}">{title}</a></body></html>
"""


def write_front(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = PAGE.format(title=app.config.html_title, target=f"{app.config.root_doc}.html")
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write_front)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
