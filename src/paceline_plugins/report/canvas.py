# SPDX-License-Identifier: Apache-2.0
"""The look of every figure: colours, fonts, units of an axis, legends that hide nothing.

Colours are Okabe and Ito's, for colour-blind readers. Ink and grid have colours that appear nowhere else, so that the
page can replace them in dark mode. matplotlib is imported here, when the first figure is drawn, and nowhere else.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.core.lazy import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a6761d")
INK, GRID = "#24292e", "#d4d8dd"
WIDTH_IN = 8.0
LONGEST_NAME = 48
LEGEND_LETTERS = 88  # of one legend line at this width and font

STYLE: Any = {
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.2,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar in a name is a dollar
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Set the style of all figures within the `with`; the user's own settings are untouched."""
    with needed("a picture", "report"):
        from matplotlib import rc_context
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # matplotlib draws a box; the page has the name
        yield


def short(name: str) -> str:
    """A name, shortened for a figure."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def new_figure(height_in: float) -> Figure:
    """An empty figure. Without pyplot: no global state, no window, no display needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def colour(turn: int) -> str:
    """The colour of the `turn`-th line."""
    return COLOURS[turn % len(COLOURS)]


def legend_above(figure: Figure, axes: Axes) -> None:
    """A legend above the axes, on one line or in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [short(label) for label in labels]
    if handles:
        letters = [max(map(len, label.split("\n"))) + 6 for label in labels]  # with the colour sample
        columns = max(1, min(len(labels), LEGEND_LETTERS // max(letters)))
        if sum(letters) <= LEGEND_LETTERS:
            columns = len(labels)
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def short_counts(axes: Axes) -> None:
    """Write 250,000 on the x axis as 250k."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def whole_numbers(axes: Axes) -> None:
    """Only whole numbers on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of a suitable unit, and its name."""
    if seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def byte_unit(most: float) -> tuple[float, str]:
    """Bytes of a suitable unit, and its name."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return scale, unit
    return 1.0, "B"
