# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from trainings.json."""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NAMES = {
    "warm": "warm start",
    "longer": "10 % labelled, no more",
    "back_translation": "back-translation",
    "iterative": "back-translation, iterative",
    "dual": "dual learning",
    "full": "all labelled",
    "dual_supervised": "all labelled, constraint",
}
rows = [row for row in json.loads((HERE / "trainings.json").read_text(encoding="utf-8")) if row["workers"] == 1]


def of(method):
    return [row for row in rows if row["method"] == method]


def both(row, way):
    return 50 * (row["forward"][way]["exact"] + row["backward"][way]["exact"])


figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained")
for k, (method, name) in enumerate(NAMES.items()):
    found = of(method)
    right.scatter([both(row, "beam") for row in found], [k - 0.17] * len(found), marker="o", color=f"C{k}")
    right.scatter([both(row, "dual_inference") for row in found], [k + 0.17] * len(found), marker="x", color=f"C{k}")
    if method in ("longer", "back_translation", "iterative", "dual"):
        looks = [[50 * (f + b) for _, f, b in row["looks"]] for row in found]
        steps = [look[0] for look in found[0]["looks"]]
        at = list(zip(*looks, strict=True))
        left.fill_between(steps, list(map(min, at)), list(map(max, at)), color=f"C{k}", alpha=0.15)
        left.plot(steps, list(map(statistics.mean, at)), color=f"C{k}", marker=".", label=name)
left.set(xlabel="steps behind the warm start", ylabel="right, % (greedy, 250 held-out sentences)")
left.legend(frameon=False)
right.set(yticks=range(len(NAMES)), yticklabels=NAMES.values())
right.set(xlabel="right, %: dots with beam search, crosses dual inference")
right.invert_yaxis()
right.grid(axis="x", alpha=0.3)
figure.savefig(HERE / "plot.png", dpi=100)
