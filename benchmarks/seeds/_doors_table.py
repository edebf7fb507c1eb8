# SPDX-License-Identifier: Apache-2.0
"""What `front_doors.py` makes of its figures: lines changed, medians and ranges, a table, a picture."""

from __future__ import annotations

import ast
import difflib
import io
import statistics
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LESS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code(text: str) -> list[str]:
    """The lines of a program that have code in them: no blank ones, no comments, no docstrings."""
    kept = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LESS:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            said = node.body[0]
            kept.difference_update(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    return [line for number, line in enumerate(text.splitlines(), 1) if number in kept]


def changed(before: str, after: str) -> tuple[int, int]:
    """Lines of code added, and removed."""
    rows = [row[0] for row in difflib.ndiff(code(before), code(after))]
    return rows.count("+"), rows.count("-")


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the largest."""
    return {
        "median": round(statistics.median(values), 2),
        "least": round(min(values), 2),
        "largest": round(max(values), 2),
    }


def ratios(values: Iterable[float], alone: Iterable[float]) -> list[float]:
    """Each repetition's figure in multiples of what the plain program took in the same repetition."""
    return [value / one for value, one in zip(values, alone, strict=True)]


def figures(rows: Sequence[Mapping[str, Any]], mark: str, alone: Mapping[int, float]) -> dict[str, Any]:
    """Of one door and one number of workers.

    Args:
        rows: with the repetition and the seconds at each mark.
        mark: which.
        alone: the plain program's, by repetition.
    """
    values = [float(row[mark]) for row in rows]
    return {"seconds": spread(values), "ratio": spread(ratios(values, (alone[int(row["repetition"])] for row in rows)))}


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def with_range(found: Mapping[str, float]) -> str:
    """Such as `3.1 (2.9 to 3.4)`."""
    return f"{found['median']:g} ({found['least']:g} to {found['largest']:g})"


def draw(
    path: Path, names: Sequence[str], bars: Mapping[str, Sequence[Mapping[str, float] | None]], label: str
) -> None:
    """Bars with their ranges, a group for each door."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(names) + 1))
    height = 0.8 / len(bars)
    for number, (title, found) in enumerate(bars.items()):
        for row, one in enumerate(found):
            if one is None:
                continue
            middle = one["median"]
            reach = [[middle - one["least"]], [one["largest"] - middle]]
            axes.barh(
                row + number * height,
                middle,
                height,
                xerr=reach,
                color=f"C{number}",
                label=title if row == 0 else None,
                error_kw={"lw": 1},
            )
    axes.set_yticks([row + (len(bars) - 1) * height / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
