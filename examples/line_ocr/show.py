# SPDX-License-Identifier: Apache-2.0
"""A page of sample lines with what was read beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = 2
RIGHT, WRONG = "#2b6f3e", "#b3261e"


def write_picture(samples: list[tuple[torch.Tensor, str, str]], path: Path) -> None:
    """Write a PNG of (picture (HEIGHT, WIDTH), truth, reading) samples; errors are in red."""
    rows = -(-len(samples) // COLUMNS)
    figure = Figure(figsize=(4.6 * COLUMNS, 0.62 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2 * COLUMNS, squeeze=False).flat
    for axis in axes:
        axis.set_axis_off()
    for number, (picture, truth, read) in enumerate(samples):
        image, words = axes[2 * number], axes[2 * number + 1]
        image.imshow(picture.numpy(), cmap="gray", vmin=-1.2, vmax=1.2, aspect="equal")
        # A dollar sign would begin a formula, but the alphabet has none.
        words.text(0, 0.5, read, color=RIGHT if read == truth else WRONG, family="monospace", va="center")
        if read != truth:
            words.text(0, 0.0, truth, color="#767676", family="monospace", va="center", fontsize=8)
    figure.savefig(path, dpi=150)
