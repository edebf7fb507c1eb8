# SPDX-License-Identifier: Apache-2.0
"""Where dual learning still errs: by how often the rarest word of a sentence stands in the labelled pairs.

PYTHONPATH=benchmarks/seeds python records/2026-11-22_dual/errors.py [out/dual/one]
"""

import sys
from collections import Counter
from pathlib import Path

import dual as benchmark

from paceline_dual import unpad

BINS = ((5, "under 5"), (10, "5 to 9"), (20, "10 to 19"), (10**9, "20 and more"))
out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/dual/one")
args = benchmark.parse(["--out", str(out)])
sentences = benchmark.Sentences(args)
pair = benchmark.pair_of(args, sentences, 0)
pair.load(out / "dual-0" / "model")
pair.eval()
for place, name in enumerate(("forward", "backward")):
    translator, words = pair.direction(name).primal, sentences.sides[1 - place].symbols
    seen = Counter(word for row in unpad(sentences.known(args, "dual")[place]) for word in set(row))
    wrong, all_of_them, swapped = Counter(), Counter(), Counter()
    for x, y in benchmark.batches(sentences.test, place):
        best = translator.beam(x, 5)[0][:, 0]
        for source, found, right in zip(unpad(x), unpad(best), unpad(y), strict=True):
            rarest = min(seen[word] for word in source)
            place_of = next(text for limit, text in BINS if rarest < limit)
            all_of_them[place_of] += 1
            wrong[place_of] += found != right
            others = [(a, b) for a, b in zip(right, found, strict=False) if a != b]
            if len(found) == len(right) and len(others) == 1:
                swapped[others[0]] += 1
    print(name, sum(wrong.values()), "wrong")
    for _, text in BINS:
        print(f"  rarest word {text:12} {wrong[text]:4} of {all_of_them[text]:4}")
    told = ", ".join(f"{words[a]} -> {words[b]} ({n})" for (a, b), n in swapped.most_common(8))
    print(f"  one word only: {told}")
