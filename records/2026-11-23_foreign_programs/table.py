# SPDX-License-Identifier: Apache-2.0
"""A record's tables from its results and `programs.toml`: python table.py [FOLDER] [NAME.json]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent


def drawn(found: dict[str, Any]) -> str:
    """Samples of each data set: for training + for evaluation alone, then of each worker."""
    rows = [
        f"{each['trained']} + {each['evaluated']}: {', '.join(map(str, each['workers']))}"
        for each in found["samples"].values()
        if any(each["workers"]) or not found["codes"][1]
    ]
    return "; ".join([*rows[:3], *([f"{len(rows) - 3} more like these"] if len(rows) > 3 else [])])


def made(found: dict[str, Any]) -> str:
    """Steps of each optimizer: alone, then of each worker."""
    steps = found["steps"]
    return "; ".join(
        f"{count}: {', '.join(map(str, steps['workers'][name]))}" for name, count in steps["alone"].items()
    )


def figures(found: dict[str, Any]) -> str:
    """The program's own, alone and of the workers."""
    return ", ".join("" if number is None else f"{number:.4g}" for number in found["figure"])


def where(file: str) -> str:
    """`pytorch+examples/mnist/main.py` as its repository has it."""
    owner, _, path = file.partition("/")
    return f"{owner.replace('+', '/')}: {path}"


def main() -> None:
    folder, name = (*sys.argv[1:], *(HERE, "results.json")[len(sys.argv) - 1 :])
    results = json.loads(Path(folder, name).read_text(encoding="utf-8"))["programs"]
    rows = tomllib.loads(Path(folder, "programs.toml").read_text(encoding="utf-8"))["program"]
    for doors in (False, True):
        print("| program | verdict | samples | steps | figure | |\n| --- | --- | --- | --- | --- | --- |")
        for row in rows:
            if bool(row.get("of")) is not doors or row["name"] not in results:
                continue
            found = results[row["name"]]
            place = "" if doors else f" ({where(row['file'])})"
            cells = [found["verdict"], drawn(found), made(found), figures(found), row.get("what", "")]
            print(f"| {row['name']}{place} | {' | '.join(cells)} |")
        print()


if __name__ == "__main__":
    main()
