# SPDX-License-Identifier: Apache-2.0
"""Boxes, lines and words as SVG, in colours that can be read on a light and on a dark page."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

GREY, BLUE, GREEN, AMBER, RED = "#808080", "#3a87c8", "#3f9c66", "#b88a1e", "#d0544f"
SIZE = 13


@dataclass
class Canvas:
    """A picture of `width` x `height`, without what is above `top`.

    The wider it is, the smaller its words are on a telephone. With `fixed` it is never drawn larger than that.
    """

    width: int
    height: int
    about: str
    top: int = 0
    fixed: bool = False
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", fill: float = 0.3
    ) -> None:
        """A rounded box with words in its middle, in lines."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" '
            f'fill-opacity="{fill:g}" stroke="{colour}"/>'
        )
        lines = label.split("\n") if label else []
        for k, line in enumerate(lines):
            self.word(x + width / 2, y + height / 2 + SIZE * (0.35 + 1.2 * (k - (len(lines) - 1) / 2)), line, "middle")

    def word(
        self, x: float, y: float, text: str, anchor: str = "start", colour: str = GREY, bold: bool = False
    ) -> None:
        """Words; `anchor` is start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = GREY, dashed: bool = False) -> None:
        """A thin line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" fill="none"{dash}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = GREY, dashed: bool = False) -> None:
        """A line with a head."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="1.6" fill="none"{dash} '
            f'marker-end="url(#{colour[1:]})"/>'
        )

    def cross(self, x: float, y: float) -> None:
        """Something ends here."""
        self.parts.append(
            f'<path d="M{x - 6:g} {y - 6:g}l12 12m0 -12l-12 12" stroke="{RED}" stroke-width="2.5" fill="none"/>'
        )

    def svg(self) -> str:
        """The file."""
        heads = "".join(
            f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for colour in (GREY, BLUE, GREEN, AMBER, RED)
            if f"#{colour[1:]})" in "".join(self.parts)
        )
        body = "\n".join(self.parts)
        box = f"0 {self.top} {self.width} {self.height - self.top}"
        size = f'width="{self.width}" height="{self.height - self.top}" ' if self.fixed else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {size}role="img" '
            f'font-family="sans-serif" font-size="{SIZE}">\n<title>{escape(self.about)}</title>\n'
            f"<defs>{heads}</defs>\n{body}\n</svg>\n"
        )
