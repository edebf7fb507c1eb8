# SPDX-License-Identifier: Apache-2.0
"""Brings what the trainings left (the folder is the argument) into trainings.json, and prints tables."""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
WAYS = ("beam", "dual_inference")
DIRECTIONS = ("forward", "backward")


def training(path: Path, workers: int) -> dict:
    row = json.loads(path.read_text(encoding="utf-8"))
    history = json.loads((path.with_suffix("") / "history.json").read_text(encoding="utf-8"))
    told = {
        name: {
            "weight": row[name]["weight"],
            **{way: {what: round(x, 4) for what, x in row[name][way].items()} for way in WAYS},
        }
        for name in DIRECTIONS
    }
    looks = [[one["step"], one["exact_forward"], one["exact_backward"]] for one in history["rows"]]
    about = {"method": row["method"], "seed": row["seed"], "workers": workers, "seconds": round(row["seconds"])}
    return {**about, "bytes_sent": history["bytes_sent"], **told, "looks": looks}


def shown(rows: list[dict], way: str, what: str, scale: float) -> None:
    print(f"{way}, {what}")
    for method in dict.fromkeys((row["method"], row["workers"]) for row in rows):
        found = [row for row in rows if (row["method"], row["workers"]) == method]
        cells = []
        for name in DIRECTIONS:
            each = [scale * row[name][way][what] for row in found]
            spread = f"+- {statistics.stdev(each):.1f}" if len(each) > 1 else ""
            cells.append(f"{statistics.mean(each):5.1f} {spread:7} ({', '.join(f'{x:.1f}' for x in each)})")
        print(f"  {method[0]:17} x{method[1]}  " + "  ".join(cells))


out = Path(sys.argv[1])
rows = [training(path, 1) for path in sorted((out / "one").glob("*-[0-9].json"))]
rows += [training(path, 4) for path in sorted((out / "four").glob("dual-[0-9].json"))]
(HERE / "trainings.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
for way in WAYS:
    shown(rows, way, "exact", 100)
    shown(rows, way, "bleu", 1)
