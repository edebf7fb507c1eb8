# SPDX-License-Identifier: Apache-2.0
"""Where dual learning still errs, of sentences in which no word is rare: the words that it takes for others.

PYTHONPATH=benchmarks/seeds python records/2026-11-26_dual_tables/errors.py [OUT]   the folder of the translators
"""

import json
import sys
from collections import Counter
from pathlib import Path

import dual as benchmark

from paceline_dual import unpad

out = Path(sys.argv[1])
sizes = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
asked = {**sizes["sizes"], **{name: sizes["text"][name] for name in ("style", "typo", "free", "prefers", "least")}}
args = benchmark.parse([*(f"--{name}={value}" for name, value in asked.items()), "--out", str(out)])
sentences = benchmark.Sentences(args)
pair = benchmark.pair_of(args, sentences, 0)
pair.load(out / "dual-0" / "model")
pair.eval()
for place, name in enumerate(("forward", "backward")):
    direction, words = pair.direction(name), sentences.sides[1 - place].symbols
    same_length, swapped, returned, wrong = 0, Counter(), 0, 0
    for x, y in benchmark.batches(sentences.test, place):
        best = direction.primal.beam(x, 5)[0][:, 0]
        back = direction.dual.beam(best, 1)[0][:, 0]
        for source, found, right, again in zip(*map(unpad, (x, best, y, back)), strict=True):
            if found == right:
                continue
            wrong += 1
            returned += again == source
            others = [(a, b) for a, b in zip(right, found, strict=False) if a != b]
            if len(found) == len(right):
                same_length += 1
                swapped.update(others if len(others) == 1 else [])
    told = ", ".join(f"{words[a]} -> {words[b]} ({n})" for (a, b), n in swapped.most_common(10))
    print(f"{name}: {wrong} of {len(sentences.test[0])} wrong, {returned} of them come back as they went")
    print(f"  {same_length} have as many words as the right one; one word only: {told}")
