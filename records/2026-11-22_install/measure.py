# SPDX-License-Identifier: Apache-2.0
"""What `import paceline` costs beyond torch, in processor seconds, run by run in turn: measure.py RUNS SRC [SRC ...]"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

CODE = """
import json, time
def loop():
    s = 0
    for i in range(5_000_000):
        s += i
clock, took = time.process_time, []
for work in ("import torch", "import paceline", "paceline.attach", "loop()"):
    begun = clock()
    exec(work)
    took.append(clock() - begun)
print(json.dumps(took))
"""


def main(runs: int, sources: list[str]) -> None:
    """Print a table: medians, and least and most."""
    rows: dict[str, list[list[float]]] = {source: [] for source in sources}
    for _ in range(runs):
        for source in sources:
            told = subprocess.run(
                [sys.executable, "-c", CODE],
                env={**os.environ, "PYTHONPATH": source},
                capture_output=True,
                text=True,
                check=True,
            )
            rows[source].append(json.loads(told.stdout))
    print("| | import torch | import paceline | first `paceline.attach` | the loop | both / loop | both / torch |")
    print("| --- " * 7 + "|")
    for number, source in enumerate(sources, 1):
        taken = rows[source]
        cells = [spread([row[k] for row in taken], 3) for k in range(4)]
        cells.append(spread([(row[1] + row[2]) / row[3] for row in taken], 2))
        cells.append(spread([(row[1] + row[2]) / row[0] for row in taken], 2))
        print(f"| {number} | {' | '.join(cells)} |")


def spread(values: list[float], digits: int) -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
