# SPDX-License-Identifier: Apache-2.0
"""Parts of the report's HTML page: it requests nothing from the network, and all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from paceline_plugins.report.canvas import COLOURS, GRID, INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root { color-scheme: light dark; --ink: #24292e; --pale: #5c6670; --paper: #ffffff;
  --panel: #f5f7f9; --line: #d4d8dd; --accent: #0072b2; --warn: #fff4dc; --warn-line: #e69f00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --pale: #9aa5b1;
  --paper: #14181d; --panel: #1d232a; --line: #39424d; --accent: #4ea6dd;
  --warn: #33290f; --warn-line: #b98310; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .8rem; }
code { font: .92em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
.lead { color: var(--pale); margin: 0 0 1.6rem; }
.lead code { color: var(--ink); background: var(--panel); padding: .15em .45em;
  border-radius: 5px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.6rem, 1fr)); gap: .7rem; }
.card { background: var(--panel); border-radius: 10px; padding: .75rem .8rem; }
.card b { display: block; font-size: 1.3rem; line-height: 1.3; font-weight: 600;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.card span { color: var(--pale); font-size: .8rem; }
.warnings { background: var(--warn); border-left: 4px solid var(--warn-line); border-radius: 6px;
  padding: .7rem 1rem; margin: 1.4rem 0; }
.warnings p { margin: .25rem 0; }
.warnings.well { background: var(--panel); border-left-color: var(--accent); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; overflow-wrap: normal;
  font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--pale); font-weight: 600; white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.long { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
tbody tr:hover { background: var(--panel); }
.note { color: var(--pale); font-size: .9rem; margin: .5rem 0 0; }
figure { margin: 0 0 2.2rem; }
figure svg { width: 100%; height: auto; display: block; color: var(--ink); }
figcaption { margin: 0 0 .5rem; }
figcaption b { display: block; }
figcaption span { color: var(--pale); font-size: .92rem; }
footer { margin-top: 3rem; color: var(--pale); font-size: .85rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
  figure .wide svg { width: 30rem; }
  th { white-space: nowrap; }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
}
@media print { main { max-width: none; } figure { break-inside: avoid; } }
"""


def whole_page(title: str, body: Iterable[str]) -> str:
    """One complete document."""
    content = "\n".join(part for part in body if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def title(text: str, command: str) -> str:
    """The title of the page, and the command that makes it again."""
    return f'<h1>{escape(text)}</h1><p class="lead"><code>{escape(command)}</code></p>'


def heading(title: str) -> str:
    """The title of a section."""
    return f"<h2>{escape(title)}</h2>"


def cards(facts: Mapping[str, str]) -> str:
    """Tiles, each a number over its name."""
    tiles = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts.items()
    )
    return f'<div class="cards">{"".join(tiles)}</div>'


def warning_box(texts: Sequence[str], well: str = "") -> str:
    """Warnings in a box; without any a box that says `well`, or nothing."""
    lines = "".join(f"<p>{escape(text)}</p>" for text in texts or filter(None, [well]))
    return f'<div class="warnings{"" if texts else " well"}" role="note">{lines}</div>' if lines else ""


def note(text: str) -> str:
    """A sentence in small print."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def table(rows: Sequence[Mapping[str, Any]], below: str = "") -> str:
    """A table whose columns are the keys of its rows, in the order of their first appearance."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = {column for column in columns if not _numeric(row.get(column) for row in rows)}
    head = "".join(_cell("th", column, column in text) for column in columns)
    body = "".join(f"<tr>{''.join(_cell('td', row.get(c, ''), c in text) for c in columns)}</tr>\n" for row in rows)
    rows_of_it = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<div class="wide" tabindex="0"><table>{rows_of_it}</table></div>{note(below)}'


def figure_block(drawing: Figure, title: str, caption: str, number: int) -> str:
    """A figure inside the page, with title and caption."""
    return (
        f'<figure role="img" aria-label="{escape(title)}"><figcaption><b>{escape(title)}</b>'
        f'<span>{escape(caption)}</span></figcaption><div class="wide">{inline_svg(drawing, number)}</div></figure>'
    )


def inline_svg(drawing: Figure, number: int) -> str:
    """The figure as SVG with the ink of the page, and ids that no other figure has."""
    sheet = StringIO()
    with style():
        drawing.savefig(sheet, format="svg", transparent=True, metadata={"Date": None})
    svg = sheet.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>f{number}-", svg)
    for colour, own in ((INK, "currentColor"), (GRID, "var(--line)"), (COLOURS[0], "var(--accent)")):
        svg = svg.replace(colour, own)  # for dark mode
    return svg


def _cell(tag: str, value: Any, text: bool) -> str:
    shown = "" if value is None else str(value)
    side = f' class="text{" long" if len(shown) > 24 else ""}"' if text else ""
    return f"<{tag}{side}>{escape(shown)}</{tag}>"


def _numeric(values: Iterable[Any]) -> bool:
    """Whether every cell of a column begins with a digit, so that it is right-aligned."""
    shown = [str(value).lstrip("-+") for value in values if value not in (None, "", "n/a")]
    return all(not cell or cell[0].isdigit() for cell in shown)
