# SPDX-License-Identifier: Apache-2.0
"""The trainings of this record: which rule, and the optimizer and learning rate of its family."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS = 8
FAMILIES = {  # dense rule, optimizer, learning rate (the best of a few for the dense rule)
    "gradient": ("sync()", "SGD", 16.0),
    "adam": ("sync()", "Adam", 0.02),
    "block": ("bmuf(period=8)", "SGD", 8.0),
    "streaming": ("streaming_diloco(period=8, codec='dense')", "SGD", 8.0),
}


@dataclass(frozen=True)
class Row:
    """One row of the table: a codec of a family, as a rule that paceline reads. `feedback` is None for dense."""

    family: str
    codec: str
    feedback: bool | None
    rule: str

    @property
    def optimizer(self) -> str:
        """The class in torch.optim."""
        return FAMILIES[self.family][1]

    @property
    def lr(self) -> float:
        """Learning rate of the family."""
        return FAMILIES[self.family][2]


CODECS = {  # name in the table -> how it is written, {} being the place of a setting
    "one_bit": "one_bit({})",
    "sign": "sign({})",
    "low_rank, rank 4": "low_rank(rank=4{})",
    "top_k, 1 %": "top_k(ratio=0.01{})",
    "e3m0": "e3m0({})",
    "top_k, 10 %": "top_k(ratio=0.1{})",
    "int8": "int8({})",
    "bf16": "bf16({})",
    "fp16": "fp16({})",
}
WARM = {  # name -> the rule; dense in the first 40 steps (top_k: 40 at each of its larger ratios)
    "one_bit, warm-up": "one_bit(warmup=40{})",
    "sign, warm-up": "sync(codec='sign{}', warmup=40)",
    "low_rank, warm-up": "power(rank=4, warmup=40{})",
    "top_k 1 %, warm-up": "top_k(ratio=0.01, warmup=40{})",
}


def _codec(name: str, feedback: bool) -> str:
    separator = "" if "({}" in CODECS[name] else ", "
    return CODECS[name].format("" if feedback else f"{separator}feedback=False").replace("()", "")


def _warm(name: str, feedback: bool) -> str:
    if feedback:
        return WARM[name].format("")
    return WARM[name].format("(feedback=False)" if "'{" in WARM[name] or "sign" in name else ", feedback=False")


def _rows(feedback: bool) -> list[Row]:
    suffix = "" if feedback else "(feedback=False)"
    rows = [Row("gradient", name, feedback, f"sync(codec='{_codec(name, feedback)}')") for name in CODECS]
    rows += [Row("gradient", name, feedback, _warm(name, feedback)) for name in WARM]
    rows += [Row("adam", "sign, warm-up", feedback, f"one_bit_adam(warmup=80, codec='sign{suffix}')")]
    rows += [Row("block", name, feedback, f"bmuf(period=8, codec='{_codec(name, feedback)}')") for name in CODECS]
    rows += [Row("streaming", "e3m0", feedback, f"streaming_diloco(period=8, codec='e3m0{suffix}')")]
    return rows


ROWS = [Row(family, "dense", None, dense) for family, (dense, _, _) in FAMILIES.items()] + _rows(True) + _rows(False)
"""The most wanted first."""
