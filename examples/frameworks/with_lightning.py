# SPDX-License-Identifier: Apache-2.0
"""Digits with Lightning's Trainer.

paceline run --workers 2 examples/frameworks/with_lightning.py
"""

from __future__ import annotations

import sys

import torch
from digits import Digits, Net, accuracy
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from paceline.doors.adapters.lightning import PacelineStrategy


class Reader(LightningModule):
    """The net and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.log("val_loss", self.net(**batch)["loss"], batch_size=len(batch["x"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(folder: str = "out/lightning") -> float:
    """Train; the accuracy of the global model."""
    torch.manual_seed(0)
    model = Reader()
    trainer = Trainer(
        strategy=PacelineStrategy("bmuf", period=8),  # the line that paceline needs
        accelerator="cpu",
        max_epochs=4,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Digits(True), 16, shuffle=True), DataLoader(Digits(False), 60))
    found = accuracy(model.net)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} workers read {found:.1%} of the test digits right")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
