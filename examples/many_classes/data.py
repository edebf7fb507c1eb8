# SPDX-License-Identifier: Apache-2.0
"""Which function is called in a line of Python, from the line's other names: samples from this machine's sources."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CALL = re.compile(r"(?<!def )(?<!class )\b([^\W\d]\w*)\(")
NAME = re.compile(r"[^\W\d]\w*")
ROOTS = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
LONGEST = 12  # names of a line that are looked at
Line = tuple[str, list[str]]


def lines(files: int) -> Iterator[Line]:
    """The called function, and the other names of its line, of all lines with a call in so many files."""
    found = sorted({path for root in ROOTS for path in root.rglob("*.py")})
    for path in random.Random(0).sample(found, min(files, len(found))):
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
            call = CALL.search(line)
            if call and (names := [name for name in NAME.findall(line) if name != call[1]][:LONGEST]):
                yield call[1], names


class Calls(Dataset[tuple[Tensor, int]]):
    """Samples: numbers of names, shape [LONGEST], int64 (0: none, or a rare one), and that of the called function.

    Args:
        lines: of which the samples are made.
        names: that have a number, from 1 on.
        labels: that have a number; lines with other functions are left out.
    """

    def __init__(self, lines: list[Line], names: dict[str, int], labels: dict[str, int]) -> None:
        kept = [(label, others) for label, others in lines if label in labels]
        self.targets = [labels[label] for label, _ in kept]
        self.inputs = torch.zeros(len(kept), LONGEST, dtype=torch.int64)
        for row, (_, others) in zip(self.inputs, kept, strict=True):
            row[: len(others)] = torch.tensor([names.get(name, 0) for name in others])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.inputs[number], self.targets[number]


def load(files: int, least: int = 3, most_names: int = 20_000) -> tuple[Calls, Calls, int, int]:
    """Samples to train on, samples held out, and how many names and labels there are.

    Args:
        files: of Python, drawn from this machine's.
        least: calls of a function that is a label.
        most_names: the most frequent ones.
    """
    every = list(lines(files))
    random.Random(1).shuffle(every)
    counts = Counter(label for label, _ in every)
    labels = {label: k for k, label in enumerate(label for label, count in counts.most_common() if count >= least)}
    common = Counter(name for _, names in every for name in names).most_common(most_names)
    names = {name: k for k, (name, _) in enumerate(common, 1)}
    held = len(every) // 20
    return Calls(every[held:], names, labels), Calls(every[:held], names, labels), len(names) + 1, len(labels)
