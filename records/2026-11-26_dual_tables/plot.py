# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: what closes the gap to all labels, in text and in speech, and what the constraint does to writing."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
NAMES = {
    "warm": "warm start",
    "longer": "labels only",
    "iterative": "back-translation",
    "dual": "dual learning",
    "full": "all labels",
}


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8").splitlines()[-1])


text, spoken = read("same_style"), read("speech")["trainings"]
written = read("writing")["written"] + read("writing_seeds")["written"]
plt.rcParams.update({"font.size": 12})
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14.5, 4.2), layout="constrained")
for place, method in enumerate(NAMES):
    for way, marker in (("beam", "o"), ("dual_inference", "x")):
        for side, color in (("forward", "C0"), ("backward", "C1")):
            if method in text[f"{way}_exact"]:
                left.scatter(100 * text[f"{way}_exact"][method][side], place, marker=marker, color=color)
    for row in (row for row in spoken if row["method"] == method):
        middle.scatter(100 * row["exact"], place, marker="o", color="C0")
        middle.scatter(100 * row["exact_both"], place, marker="x", color="C0")
        middle.scatter(100 * row["explained"], place, marker="s", color="C1")
for axes in (left, middle):
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
left.set(
    title="numbers in words, a tenth labelled",
    xlabel="right, %: to French blue, to English orange;\ncrosses dual inference",
)
middle.set(
    title="spoken words, a tenth labelled",
    xlabel="words right, % (blue; crosses dual inference);\nvariance of sounds explained, % (orange)",
)
weights = sorted({tuple(row["weights"]) for row in written})
for temperature, color in (("1.0", "C0"), ("0.7", "C3")):
    for key, marker in (("sentiment", "o"), ("agreeing", "^")):
        for row in written:
            share = 100 * row["written"][temperature][key]
            right.scatter(weights.index(tuple(row["weights"])), share, marker=marker, color=color)
right.set_xticks(range(len(weights)), [f"{weight[1]:g}" for weight in weights])
right.set(title="reviews written to order", xlabel="scale of the constraint for the writer")
right.set_ylabel("words of sentiment, % (circles), the label's\n(triangles); temperature 1 blue, 0.7 red", fontsize=10)
right.grid(axis="y", alpha=0.3)
figure.savefig(RESULTS / "plot.png", dpi=110)
