# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from table.json and windows.json: the loss by method, and what late gradients missed."""

import json
import sys
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
RATE, BEST_ASGD = 0.3, 0.15
METHODS = {
    ("one worker", RATE): "one worker",
    ("asgd", RATE): "asgd",
    ("fresh first half", RATE): "asgd, no delays in the 1st half",
    ("fresh second half", RATE): "asgd, no delays in the 2nd half",
    ("asgd", BEST_ASGD): f"asgd at its best rate, {BEST_ASGD}",
    ("constant", RATE): "dc_asgd constant",
    ("constant, limit", RATE): "dc_asgd constant, limit 1",
    ("adaptive", RATE): "dc_asgd adaptive",
    ("normalized", RATE): "dc_asgd normalized",
    ("constant, second half", RATE): "constant from half on",
    ("adaptive, second half", RATE): "adaptive from half on",
    ("normalized, second half", RATE): "normalized from half on",
}
COLOURS = {"constant": "C0", "adaptive": "C1", "normalized": "C3", "hessian": "black"}
found = json.loads((RESULTS / "table.json").read_text(encoding="utf-8"))
longest = max(line["minibatches"] for line in found["trainings"])
probed = json.loads(Path(__file__).with_name("windows.json").read_text(encoding="utf-8"))
windows = [window for window in probed if window["rate"] == RATE]


def over_one_worker(method: str, rate: float) -> list[float]:
    """Of each seed, the loss over that of one worker, %; of the rule that has the most seeds."""
    mine = [cell for cell in found["cells"] if (cell["method"], cell["rate"]) == (method, rate)]
    mine = [cell for cell in mine if cell["minibatches"] == longest and cell["workers"] in (1, 8)]
    rule = max(mine, key=lambda cell: len(cell["seeds"]))["rule"]
    about = {"method": method, "rate": rate, "rule": rule, "minibatches": longest}
    alone = {"method": "one worker", "rate": RATE, "minibatches": longest}
    base = {line["seed"]: line["loss"] for line in found["trainings"] if alone.items() <= line.items()}
    lines = [line for line in found["trainings"] if about.items() <= line.items() and line["loss"] is not None]
    return [100 * (line["loss"] / base[line["seed"]] - 1) for line in lines if line["workers"] in (1, 8)]


plt.rcParams.update({"font.size": 11, "lines.linewidth": 1.8, "legend.fontsize": 9})
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.8), layout="constrained", width_ratios=(1.2, 1, 1))
for place, (which, name) in enumerate(METHODS.items()):
    each = over_one_worker(*which)
    color = next((c for kind, c in COLOURS.items() if kind in name), "0.35")
    left.plot(each, [place] * len(each), "o", color=color, markersize=5, alpha=0.5)
    left.plot([fmean(each)], [place], "|", color=color, markersize=16, markeredgewidth=2.5)
left.set_yticks(range(len(METHODS)), list(METHODS.values()))
left.invert_yaxis()
left.axvline(0, color="black", linewidth=1)
left.grid(axis="x", alpha=0.3)
left.set(xlabel="held-out loss over one worker's, %", title=f"8 workers, rate {RATE:g}: seeds and mean")

passed = [window["update"] / window["minibatches"] for window in windows]
changes = [100 * window["change"] for window in windows]
middle.plot(passed, changes, color="0.5", linestyle=":", label="change, % of the gradient")
for kind, color in COLOURS.items():
    shares = [100 * max(window["fit"][kind]["share"], 0.0) for window in windows]
    middle.plot(passed, shares, color=color, label=f"% of it that {kind} can mend")
    fits = [window["fit"][kind]["strength"] for window in windows]
    if kind != "hessian":
        usual = median(fits)
        right.plot(passed, [fit / usual for fit in fits], color=color, label=f"{kind}, median {usual:.2g}")
middle.set(xlabel="part of the training", title="what the delay changes", ylim=(0, 1.6 * max(changes)))
right.set(xlabel="part of the training", title="the best strength over its median", yscale="log")
right.yaxis.set_major_formatter("{x:g}")
right.yaxis.set_minor_formatter("{x:g}")
for axes in (middle, right):
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
figure.savefig(RESULTS / "plot.png", dpi=110)
