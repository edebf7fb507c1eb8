# SPDX-License-Identifier: Apache-2.0
"""Prints what keeping trained models in bf16 changes: of each model, the perplexity over that of its fp32 numbers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.extend(str(Path(__file__).resolve().parents[2] / "benchmarks" / folder) for folder in ("seeds", "common"))
import lightrnn_equal

from paceline_lightrnn import LightRNN, score

SCORED = 30_000


def main() -> None:
    """Score the models of a folder of `lightrnn_equal.py`, as they are and rounded."""
    out, words, rare = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    data = lightrnn_equal.data_of(SimpleNamespace(out=out, words=words, min_count=rare))  # type: ignore[arg-type]
    held, found = lightrnn_equal.held_out(data, SCORED), {}
    for folder in sorted(out.glob("light-*[0-9]/")):
        model = LightRNN.load(folder).eval()
        before = score(model, held)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        after = score(model, held)
        found[folder.name] = math.exp((after.nats - before.nats) / after.words)
    print(json.dumps({"bf16_over_fp32": found}))


if __name__ == "__main__":
    main()
