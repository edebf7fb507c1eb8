# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from trainings.json and limit.json."""

import json
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NAMES = {
    "full": "full softmax",
    "adaptive": "adaptive softmax",
    "fixed": "LightRNN, first table kept",
    "lightrnn": "LightRNN",
}


def words(row):
    return list(accumulate(one["words"] / 1e6 for one in row["history"]))


def perplexities(row):
    return [one["perplexity"] for one in row["history"]]


rows = json.loads((HERE / "trainings.json").read_text(encoding="utf-8"))
limit = json.loads((HERE / "limit.json").read_text(encoding="utf-8"))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for k, (model, name) in enumerate(NAMES.items()):
    for number, row in enumerate(row for row in rows if row["model"] == model):
        left.plot(words(row), perplexities(row), color=f"C{k}", marker=".", label=None if number else name)
left.set(
    xlabel="words read, millions", ylabel="perplexity on held-back text", yscale="log", title="d = 128, three seeds"
)
left.legend(frameon=False)

main = {(row["model"], row["seed"]): row for row in rows}
for k, model in ((0, "full"), (3, "lightrnn")):
    points = [(128, main[model, 0]["perplexity"])]
    points += [(row["dimension"], row["perplexity"]) for row in limit if row["model"] == model and row["rounds"] == 1]
    points.sort()
    right.plot(*zip(*points, strict=True), color=f"C{k}", marker="o", label=NAMES[model])
longer = [row for row in limit if row["rounds"] > 1]
for row in longer:
    right.plot(row["dimension"], row["perplexity"], color="C3", marker="*", markersize=11, linestyle="")
    right.annotate(f" {row['words'] / 1e6:.0f} M words", (row["dimension"], row["perplexity"]))
right.set(xlabel="hidden size", ylabel="perplexity", xscale="log", title="2.66 M words, seed 0")
right.set_xticks([128, 256, 512], ["128", "256", "512"])
right.minorticks_off()
right.legend(frameon=False)
for axes in (left, right):
    axes.grid(alpha=0.3, which="both")
figure.savefig(HERE / "plot.png", dpi=110)
