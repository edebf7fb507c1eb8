# SPDX-License-Identifier: Apache-2.0
"""The document of a run's page: sections of text, and charts that a browser draws with uPlot.

The file of `paceline report` and the page of `paceline watch --web` are the same document. It loads nothing: styles,
scripts and data stand in it. A content security policy allows these scripts by their digests and no others, so text
from a log could not run even if it were not escaped.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from paceline_plugins.report.charts import Chart
from paceline_plugins.report.page import CSS

ASSETS = Path(__file__).with_name("assets")
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.min.js", "page.js")
PARTS = {"compute": "computing", "data": "waiting for data", "wait": "waiting", "exchange": "exchanging"}
"""Parts of a worker's time -> their names; the colours are in page.css."""
MOST_BARS = 128
NO_SCRIPT = "The charts need JavaScript; all else on this page does not."


def document(title: str, sections: Mapping[str, str], drawn: Sequence[Chart], live: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        title: of the window.
        sections: key -> HTML, in the order of the page.
        drawn: the charts; the section of each is among `sections`.
        live: what a page that goes on asking starts with; empty for a file.
    """
    data = {"charts": {chart.key: chart.as_json() for chart in drawn}, "live": dict(live) or None}
    body = "\n".join(f'<section id="part-{escape(key)}">{html}</section>' for key, html in sections.items())
    scripts = "\n".join(f"<script>{_asset(name)}</script>" for name in SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" '
        f'content="no-referrer">\n<title>{escape(title)}</title>\n<style>{_style()}</style>\n</head>\n'
        f'<body>\n{_live_bar() if live else ""}<main>\n<noscript><p class="note">{NO_SCRIPT}</p></noscript>\n'
        f'{body}\n</main>\n<script type="application/json" id="data">{inline_json(data)}</script>\n'
        f"{scripts}\n</body>\n</html>\n"
    )


@lru_cache
def policy() -> str:
    """The content security policy: our scripts and styles by their digests, and requests to where the page is from."""
    scripts = " ".join(_digest(_asset(name)) for name in SCRIPTS)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_digest(_style())}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def inline_json(value: Any) -> str:
    """JSON that stands in a script element: no `<`, so no tag ends it, and ASCII only."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_section(chart: Chart) -> str:
    """Title and caption of a chart, and the place where it is drawn."""
    return (
        f'<figure data-chart="{escape(chart.key)}"><figcaption><b>{escape(chart.title)}</b>'
        f"<span>{escape(chart.caption)}</span></figcaption></figure>"
    )


def time_bars(rows: Sequence[tuple[str, Mapping[str, float], str]], caption: str) -> str:
    """A bar for each row: its label, seconds by part of `PARTS`, and their sum as text."""
    longest = max((sum(parts.values()) for _, parts, _ in rows), default=0.0)
    if not longest:
        return ""
    shown = [part for part in PARTS if any(parts.get(part) for _, parts, _ in rows)]
    legend = "".join(f'<span><i class="part {part}"></i>{PARTS[part]}</span>' for part in shown)
    bars = "".join(_bar(label, parts, text, longest) for label, parts, text in rows[:MOST_BARS])
    more = f'<p class="note">and {len(rows) - MOST_BARS} more</p>' if len(rows) > MOST_BARS else ""
    return (
        f'<figure class="times"><figcaption><b>Where the time went</b><span>{escape(caption)}</span></figcaption>'
        f'<p class="legend">{legend}</p><div class="bars">{bars}</div>{more}</figure>'
    )


def _bar(label: str, parts: Mapping[str, float], text: str, longest: float) -> str:
    left, boxes, total = 0.0, [], sum(parts.values())
    for part in PARTS:
        width = 1000 * parts.get(part, 0.0) / longest
        if width:
            boxes.append(f'<rect class="{part}" x="{left:.1f}" width="{width:.1f}" height="20"/>')
        left += width
    told = ", ".join(f"{PARTS[part]} {100 * parts[part] / total:.1f} %" for part in PARTS if parts.get(part))
    return (
        f'<span class="who">{escape(label)}</span><svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{label}: {told}")}"><title>{escape(told)}</title>{"".join(boxes)}</svg>'
        f'<span class="sum">{escape(text)}</span>'
    )


def _live_bar() -> str:
    """The state of a live page, and a button that stops its changes."""
    return (
        '<div class="live"><span class="dot" aria-hidden="true"></span><span id="status"></span>'
        '<span id="said" class="hidden" role="status"></span>'
        '<button type="button" id="pause" aria-pressed="false">Pause</button></div>'
    )


@lru_cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()


@lru_cache
def _style() -> str:
    return "\n".join([CSS, *(_asset(name) for name in STYLES)])


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
