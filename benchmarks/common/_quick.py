# SPDX-License-Identifier: Apache-2.0
"""The quick form of a benchmark: sizes that show that it runs and what it prints, no more.

Whoever imports this can import `devtools`, too, which no installation has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None = None, **quick: Any) -> argparse.Namespace:
    """Add `--quick` and read the command line; with it the values of `quick` replace those that were given.

    They replace them, so that a record's own command, which names its sizes, has a quick form, too.

    Args:
        parser: of the benchmark.
        given: in place of the command line.
        quick: by the name of an argument.
    """
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args(given)
    if options.quick:
        vars(options).update(quick)
    return options
