# SPDX-License-Identifier: Apache-2.0
"""The report page of a training of a pair, in the look of every other report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_dual import files
from paceline_dual.report import SIDES, History, Translation, translations, warnings, words_of
from paceline_dual.show import number
from paceline_plugins.report import page
from paceline_plugins.report.canvas import GRID, INK, colour, legend_above, new_figure, short_counts, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT = "report.html"
CSS = (
    "<style>.lead code{overflow-wrap:anywhere} .try{background:var(--panel);border-radius:10px;padding:.8rem 1rem;"
    "margin:.9rem 0} .try p{margin:.15rem 0;overflow-wrap:anywhere} .try p span{color:var(--pale);display:inline-block;"
    "min-width:6.5rem} .try td.text,.try th.text{white-space:normal;overflow-wrap:anywhere} "
    ".try .none{color:var(--pale)} .try .right{color:#009e73;"
    "font-weight:600} .try table{margin-top:.5rem} .try td:nth-child(2){width:60%;min-width:9rem}</style>"
)
ARROWS = {"forward": "x → y", "backward": "y → x"}
SCORES = (
    "Mean log-probability of held-out pairs, nats, summed over tokens. Dashed: the priors, which see no source; a "
    "model that looks at its input is above. The upright line is the end of the warm-up."
)
EXACT = "Share of held-out pairs whose best output is the reference."
REWARDS = (
    "Of the samples drawn since the evaluation before. Above: r2, log P of the source given the sample, by the other "
    "model. Below: r1, log P of the sample by the prior."
)
GAP = "log P(x) + log P(y|x) - log P(y) - log P(x|y) of held-out pairs, nats: 0 where both models and the priors agree."
TRANSLATED = (
    "The first held-out pairs, evaluation by evaluation; evaluations in a row with the same output stand together. "
    "Rewards are those of the output at the last of them."
)


def write_page(folder: Path, words: Path | None = None) -> Path:
    """Write DIR/report.html from what a training has left so far; the path of the page."""
    history = History.load(folder)
    tried = translations(history, words_of(folder, words))
    target = folder / REPORT
    files.write_text(target, page.whole_page("Dual learning", _body(history, tried, folder.resolve().name)))
    return target


def _body(history: History, tried: Sequence[Translation], name: str) -> list[str]:
    rows = history.rows
    workers = f"{history.workers} worker{'s' if history.workers > 1 else ''}"
    under = f" under <code>{escape(history.rule)}</code>" if history.workers > 1 else ""
    parts = [
        CSS,
        f"<h1>Dual learning: {escape(name)}</h1>",
        f'<p class="lead">method {escape(history.method)}, {history.warm:,} of {history.steps:,} steps are warm-up, '
        f"{workers}{under}</p>",
        page.cards(_facts(history)),
        page.warning_box(warnings(history)),
        page.heading("Both directions"),
        page.figure_block(_scores(history), "Score", SCORES, 1),
    ]
    if any(row["exact_forward"] is not None or row["exact_backward"] is not None for row in rows):
        parts.append(page.figure_block(_exact(history), "Right outputs", EXACT, 2))
    if any(row["rewards"][name] for row in rows for name in ARROWS):
        parts += [page.heading("Rewards"), page.figure_block(_rewards(history), "Rewards", REWARDS, 3)]
    parts += [page.heading("The constraint"), page.figure_block(_gap(history), "Gap", GAP, 4)]
    parts += [page.heading("Evaluations"), page.table(_rows(rows))]
    if tried:
        parts += [page.heading("Translations, round by round"), page.note(TRANSLATED)]
        parts += [_tried(one) for one in tried]
    return parts


def _facts(history: History) -> dict[str, str]:
    last, start = history.rows[-1], history.start
    found = {"log P(y | x)": number(last["forward"]), "log P(x | y)": number(last["backward"])}
    for name, arrow in ARROWS.items():
        if last[f"exact_{name}"] is not None:
            found[f"right, {arrow}"] = _percent(last[f"exact_{name}"])
            if last["step"] > history.warm > 0:
                found[f"right after the warm-up, {arrow}"] = _percent(start[f"exact_{name}"])
    return {**found, "mean |gap|": number(last["gap"]), "training": f"{last['seconds']:,.0f} s"}


def _rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    found = []
    for row in rows:
        shown = {"step": f"{row['step']:,}", "phase": str(row["phase"]).replace("_", " ")}
        for name, arrow in ARROWS.items():
            reward = row["rewards"][name] or {}
            shown |= {
                f"{arrow} log P": number(row[name]),
                f"{arrow} right": _percent(row[f"exact_{name}"]),
                f"{arrow} r": number(reward.get("r")),
            }
        found.append({**shown, "|gap|": number(row["gap"]), "gap rms": number(row["gap_rms"])})
    return found


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _tried(one: Translation) -> str:
    """A source with its outputs."""
    source, target = SIDES[one.direction]
    lines = ((f"{source} (source)", one.source), (f"{target} (reference)", one.reference))
    head = "".join(f"<p><span>{name}</span> {escape(text)}</p>" for name, text in lines)
    names = (("after step", ""), ("output", ' class="text"'), ("r1", ""), ("r2", ""), ("r", ""))
    columns = "".join(f"<th{side}>{name}</th>" for name, side in names)
    rows = []
    for attempt in one.attempts:
        steps = f"{attempt.first:,}" + (f" to {attempt.last:,}" if attempt.last > attempt.first else "")
        mark = ' <span class="right">✓</span>' if attempt.right else ""
        shown = escape(attempt.output) or '<span class="none">(nothing)</span>'
        cells = [f"<td>{steps}</td>", f'<td class="text">{shown}{mark}</td>']
        cells += [f"<td>{escape(number(value))}</td>" for value in (attempt.r1, attempt.r2, attempt.r)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="try">{head}<div class="wide">{table}</div></div>'


# -- figures ----------------------------------------------------------------------------------------


def _drawn(height: float, panels: int, draw: Callable[[list[Axes]], None], history: History) -> Figure:
    """A figure of panels over one axis of steps, with the end of the warm-up."""
    with style():
        figure = new_figure(height)
        axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
        draw(axes)
        for one in axes:
            if 0 < history.warm < history.rows[-1]["step"]:
                one.axvline(history.warm, color=INK, linewidth=1, alpha=0.5)
        axes[-1].set_xlabel("step")
        short_counts(axes[-1])
        legend_above(figure, axes[0])
    return figure


def _line(axes: Axes, history: History, keys: tuple[str, ...], turn: int, **more: Any) -> None:
    """What stands in the rows under these keys, one within the other; rows without it are left out."""
    points = []
    for row in history.rows:
        value: Any = row
        for key in keys:
            value = None if value is None else value[key]
        if value is not None:
            points.append((row["step"], value))
    if points:
        alone = {"marker": "o"} if len(points) < 30 else {}
        axes.plot(*zip(*points, strict=True), color=colour(turn), **{"markersize": 4, **alone, **more})


def _scores(history: History) -> Figure:
    def draw(axes: list[Axes]) -> None:
        dashed = {"linestyle": "--", "linewidth": 1.3, "marker": ""}
        for turn, (name, label) in enumerate((("forward", "log P(y | x)"), ("backward", "log P(x | y)"))):
            _line(axes[0], history, (name,), turn, label=label)
        for turn, (name, label) in enumerate((("prior_y", "log P(y)"), ("prior_x", "log P(x)"))):
            _line(axes[0], history, (name,), turn, label=label, **dashed)
        axes[0].set_ylabel("nats")
        axes[0].set_ylim(bottom=_bottom(history))

    return _drawn(3.6, 1, draw, history)


def _bottom(history: History) -> float:
    """A little below the priors: what a model is at first would press all that is of interest together."""
    last = history.rows[-1]
    found = [row[name] for row in history.rows for name in ("prior_x", "prior_y")] + [last["forward"], last["backward"]]
    return 1.15 * min((float(value) for value in found if math.isfinite(value)), default=-1.0)


def _exact(history: History) -> Figure:
    def draw(axes: list[Axes]) -> None:
        for turn, (name, arrow) in enumerate(ARROWS.items()):
            _line(axes[0], history, (f"exact_{name}",), turn, label=arrow)
        axes[0].set_ylim(-0.02, 1.02)
        axes[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")

    return _drawn(3.0, 1, draw, history)


def _rewards(history: History) -> Figure:
    def draw(axes: list[Axes]) -> None:
        for panel, part in zip(axes, ("r2", "r1"), strict=True):
            for turn, (name, arrow) in enumerate(ARROWS.items()):
                _line(panel, history, ("rewards", name, part), turn, label=arrow)
            panel.set_ylabel(f"{part}, nats")

    return _drawn(4.6, 2, draw, history)


def _gap(history: History) -> Figure:
    def draw(axes: list[Axes]) -> None:
        for turn, (name, label) in enumerate((("gap", "mean |gap|"), ("gap_rms", "root mean square"))):
            _line(axes[0], history, (name,), turn, label=label)
        axes[0].axhline(0, color=GRID, linewidth=1)
        axes[0].set_ylabel("nats")

    return _drawn(3.0, 1, draw, history)
