# SPDX-License-Identifier: Apache-2.0
"""Brings what the trainings left (the folder is the argument) into trainings.json and limit.json."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
KEPT = (
    "words",
    "seconds",
    "perplexity",
    "perplexity_reallocated",
    "cost_before",
    "cost_after",
    "lower_bound",
    "allocation_s",
)


def row_of(path: Path) -> dict:
    row = json.loads(path.read_text(encoding="utf-8"))
    row["history"] = [
        {key: round(one[key], 4) if isinstance(one[key], float) else one[key] for key in KEPT if key in one}
        for one in row["history"]
    ]
    return row | {"perplexity": round(row["perplexity"], 3)}


def write(name: str, rows: list[dict]) -> None:
    (HERE / name).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


out = Path(sys.argv[1])
write("trainings.json", [row_of(path) for path in sorted((out / "128").glob("*-[0-9].json"))])
limit = []
for folder, dimension, rounds in (("128x8", 128, 8), ("512", 512, 1)):
    for path in sorted((out / folder).glob("*-[0-9].json")):
        row = row_of(path)
        words = sum(one["words"] for one in row["history"])
        limit.append({"dimension": dimension, "rounds": rounds, "words": words, **row})
write("limit.json", limit)
