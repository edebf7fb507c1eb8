# SPDX-License-Identifier: Apache-2.0
"""Programs with zero lines around them, on virtual workers, and what each worker wrote."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from paceline.core import rng
from paceline.forecast.sim.simulate import run_script
from paceline_plugins.zero.virtual import VirtualZeroLines


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """The generators, arguments and paths of the test are what they were."""
    state, argv, path = rng.capture(), sys.argv, list(sys.path)
    try:
        yield
    finally:
        rng.restore(state)
        sys.argv, sys.path[:] = argv, path


def virtual(folder: Path, source: str, workers: int = 2, random_data: bool = False) -> None:
    """Run the program on virtual workers; the rule is that of the environment."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    with forgotten(), VirtualZeroLines(script, folder / "logs", random_data) as zero_lines:
        run_script(script, workers, [], zero_lines.worker)


def each(folder: Path, name: str, workers: int = 2) -> list[Path]:
    """The file of that name that each worker wrote, where the program wrote it into its folder."""
    own = [folder / "logs" / "files" / f"rank-{rank:03d}" / str(folder).lstrip("/") for rank in range(1, workers)]
    return [place / name for place in (folder, *own)]
