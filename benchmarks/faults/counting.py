# SPDX-License-Identifier: Apache-2.0
"""Weights that count which samples entered, under SIGKILL at the worst moments.

    python benchmarks/faults/counting.py [--mode elastic|restarts|asgd|dc_asgd] [--kills 30] [--seed 0]
        [--quick] [--out DIR]

A model whose weights name the samples that entered it, in which epoch and how often (`devtools.storm`), is
trained through `paceline run`; processes are killed at places of the program, not at times
(`devtools/counting/points.py`): one worker, all workers, or the launcher with the control plane. Under asynchronous
rules the model counts in every piece of the parameters (`devtools/counting/pushes.py`), and two owners are killed in
each run. Only the weights with which the run ends are read: no ledger, no log.

The last line is a JSON object: for each mode `kills` that happened, samples `lost` and `repeated` in the final weights,
runs that are `unfinished` (a launcher that did not end well, or workers with different weights), `runs` and `seconds`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from devtools.counting import blocks, owners
from devtools.counting.play import Played, summary

Play = Callable[[Path, int, int, bool], list[Played]]
MODES: dict[str, Play] = {
    "elastic": blocks.elastic,
    "restarts": blocks.restarts,
    "asgd": owners.asgd,
    "dc_asgd": owners.dc_asgd,
}
"""Name -> plays so many kills: (directory, kills, seed, quick)."""


def main() -> None:
    """Play; JSON on the last line."""
    parser = argparse.ArgumentParser(description="A count of what entered, under kills.")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be given several times; all by default")
    parser.add_argument("--kills", type=int, default=30, help="of each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one run of each mode, with a kill or two")
    parser.add_argument("--out", type=Path, help="directory for what the runs leave; it is emptied first")
    options = parser.parse_args()
    directory = options.out or Path(tempfile.mkdtemp(prefix="counting-"))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    found = {
        mode: summary(MODES[mode](directory.resolve(), options.kills, options.seed, options.quick))
        for mode in options.mode or MODES
    }
    print(f"all of it: {directory}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
