# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from blocks.txt: the kills of each run by whom they hit."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
runs = []
for line in (HERE / "blocks.txt").read_text(encoding="utf-8").splitlines():
    found = re.match(r"(\w+)\s+(\d+)\s+(\d+) of \d+ kills .*? s  (.*)", line)
    kills = found[4].split()[: int(found[3])]
    runs.append((f"{found[1]} {found[2]}", [kill.partition(":")[2] or "one worker" for kill in kills]))
figure, axes = plt.subplots(figsize=(6.5, 3.0), layout="constrained")
left = [0] * len(runs)
for k, whom in enumerate(("one worker", "all", "control")):
    counts = [kills.count(whom) for _, kills in runs]
    label = {"all": "all workers", "control": "the launcher"}.get(whom, whom)
    axes.barh([name for name, _ in runs], counts, left=left, color=f"C{k}", label=label)
    left = [a + b for a, b in zip(left, counts, strict=True)]
axes.invert_yaxis()
axes.set(xlabel="kills; lost 0, repeated 0 in every run")
axes.legend(frameon=False)
figure.savefig(HERE / "plot.png", dpi=100)
