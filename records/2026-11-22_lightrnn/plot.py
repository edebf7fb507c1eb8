# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from trainings.json."""

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

rows = json.loads((HERE / "trainings.json").read_text(encoding="utf-8"))
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for k, (model, name) in enumerate(NAMES.items()):
    for number, row in enumerate(row for row in rows if row["model"] == model):
        words = list(accumulate(one["words"] / 1e6 for one in row["history"]))
        label = name if not number else None
        axes.plot(words, [one["perplexity"] for one in row["history"]], color=f"C{k}", marker=".", label=label)
axes.set(xlabel="words read, millions", ylabel="perplexity on held-back text", yscale="log")
axes.legend(frameon=False)
axes.grid(alpha=0.3, which="both")
figure.savefig(HERE / "plot.png", dpi=120)
