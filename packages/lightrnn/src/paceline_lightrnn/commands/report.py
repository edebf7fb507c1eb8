# SPDX-License-Identifier: Apache-2.0
"""The report page of a LightRNN training, in the look of every other report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline_lightrnn import files
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.report import Trained, falls, heat, lines_of, samples
from paceline_plugins.report import page
from paceline_plugins.report.canvas import colour, legend_above, new_figure, style, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = (
    "<style>.words td.text{min-width:16rem;white-space:pre-wrap} .lead code{overflow-wrap:anywhere} "
    ".sample{white-space:pre-wrap;background:var(--panel);border-radius:10px;padding:.8rem 1rem;margin:.7rem 0;"
    "font:.9em/1.5 ui-monospace,Menlo,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere}</style>"
)
SHARED = (
    "Words of a {axis} share one vector of the input and one of the output; the re-allocation brings words together "
    "that the text uses alike. Shown are the {axis}s whose words come most often, each with its most frequent words."
)
HEAT = (
    "Rows and columns in the order of how often their words come; the darker, the more often. Words that are frequent "
    "keep out of each other's way where they are used unlike: each takes rarer ones into its row and its column."
)
NEW_TABLE = (
    "Costs are mean nats of a word of the training text, with the states before each word as they were. The new table "
    "changes the input vectors too: perplexity rises at first, and usually falls below the old one in the next round."
)


def write_page(folder: Path) -> Path:
    """Write DIR/report/index.html from what a training left; the path of the page."""
    trained = Trained.load(folder)
    target = folder / "report" / "index.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(target, page.whole_page("LightRNN", _body(trained, folder.resolve().name)))
    return target


def _body(trained: Trained, name: str) -> list[str]:
    model = trained.model
    table = model.table if isinstance(model, LightRNN) else None
    shape = f"a table of {table.rows:,} x {table.columns:,}" if table is not None else "a vector for each word"
    parts = [
        CSS,
        f"<h1>LightRNN: {escape(name)}</h1>",
        f'<p class="lead">{len(trained.vocabulary):,} words, {shape}, dimension {model.dimension}, '
        f"{trained.workers} worker{'s' if trained.workers > 1 else ''}"
        + (f" under <code>{escape(trained.rule)}</code>" if trained.workers > 1 else "")
        + "</p>",
        page.cards(_facts(trained)),
        page.warning_box(falls(trained.history)),
        page.heading("Rounds"),
        _figure(_perplexities(trained.history), "Perplexity", "On held-out text, after each round.", 1),
        page.table(_rows(trained.history), NEW_TABLE if len(trained.history) > 1 else ""),
        page.heading("Size"),
        page.table(_sizes(trained), "The full softmax has a vector for each word at its input and at its output."),
    ]
    if table is not None:
        parts += _table_parts(trained, table)
    parts.append(page.heading("Text that it makes up"))
    parts += [f'<div class="sample">{escape(text)}</div>' for text in samples(model, trained.vocabulary)]
    return parts


def _facts(trained: Trained) -> dict[str, str]:
    last = trained.history[-1]
    size, full = trained.sizes, trained.full
    seconds = sum(row["seconds"] for row in trained.history)
    return {
        "perplexity": f"{last['perplexity']:.1f}",
        "words a second": f"{sum(row['words'] for row in trained.history) / max(seconds, 1e-9):,.0f}",
        "model": _bytes(size.total),
        "with a full softmax": _bytes(full.total),
        "vectors, times smaller": f"{full.vectors / size.vectors:,.1f}",
        "training": f"{seconds:,.0f} s",
    }


def _rows(history: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    found = []
    for row in history:
        shown = {
            "round": str(row["round"]),
            "perplexity": f"{row['perplexity']:.2f}",
            "words": f"{row['words']:,}",
            "seconds": f"{row['seconds']:.1f}",
            "words/s": f"{row['words_per_s']:,.0f}",
        }
        if "cost_after" in row:
            shown |= {
                "cost before": f"{row['cost_before']:.4f}",
                "cost after": f"{row['cost_after']:.4f}",
                "lower bound": f"{row['lower_bound']:.4f}",
                "perplexity, new table": f"{row['perplexity_reallocated']:.2f}",
                "allocation": f"{row['allocation_s']:.1f} s",
            }
        found.append(shown)
    return found


def _sizes(trained: Trained) -> list[dict[str, str]]:
    mine, full = trained.sizes, trained.full
    rows = (
        ("input vectors", mine.input, full.input),
        ("output", mine.output, full.output),
        ("recurrent network", mine.recurrent, full.recurrent),
        ("together", mine.total, full.total),
    )
    return [
        {"part": part, "this model": _bytes(a), "full softmax": _bytes(b), "times smaller": f"{b / a:,.1f}"}
        for part, a, b in rows
    ]


def _table_parts(trained: Trained, table: Any) -> list[str]:
    parts = [page.heading("The table")]
    parts.append(_figure(_heat(heat(table, trained.vocabulary)), "How often words come", HEAT, 2))
    for axis in ("row", "column"):
        rows = [
            {axis: str(line), "comes": f"{count:,}", "words that share it": "   ".join(words)}
            for line, count, words in lines_of(table, trained.vocabulary, axis)
        ]
        parts += [page.heading(f"Words that share a {axis}"), f'<div class="words">{page.table(rows)}</div>']
        parts.append(page.note(SHARED.format(axis=axis)))
    return parts


def _figure(drawing: Figure, title: str, caption: str, number: int) -> str:
    return page.figure_block(drawing, title, caption, number)


def _perplexities(history: Sequence[dict[str, Any]]) -> Figure:
    with style():
        figure = new_figure(3.2)
        axes = figure.subplots()
        turns = [row["round"] for row in history]
        axes.plot(turns, [row["perplexity"] for row in history], color=colour(0), marker="o", label="after the round")
        new = [(row["round"], row["perplexity_reallocated"]) for row in history if "perplexity_reallocated" in row]
        if new:
            label = "with the new table, before training goes on"
            axes.plot(*zip(*new, strict=True), color=colour(1), marker="D", linestyle="none", label=label)
        axes.set_xlabel("round")
        axes.set_ylabel("perplexity")
        axes.set_yscale("log")  # a new table can raise it tenfold for a while
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        whole_numbers(axes)
        legend_above(figure, axes)
    return figure


def _heat(values: Any) -> Figure:
    with style():
        figure = new_figure(6.4)
        axes = figure.subplots()
        axes.grid(visible=False)
        shade = axes.pcolormesh(np.ma.masked_invalid(values), cmap="Blues", rasterized=True)
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("columns, most frequent words first")
        axes.set_ylabel("rows, most frequent words first")
        figure.colorbar(shade, ax=axes, label="mean count of a word, log10", shrink=0.8)
    return figure


def _bytes(count: int) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count} B"
