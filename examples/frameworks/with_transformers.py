# SPDX-License-Identifier: Apache-2.0
"""Digits with the Trainer of transformers.

paceline run --workers 2 examples/frameworks/with_transformers.py
"""

from __future__ import annotations

import sys

import torch
from digits import Digits, Net, accuracy
from transformers import Trainer, TrainingArguments

from paceline.doors.adapters.hugging_face import PacelineCallback


def main(folder: str = "out/transformers") -> float:
    """Train; the accuracy of the global model."""
    torch.manual_seed(0)
    model = Net()
    arguments = TrainingArguments(
        folder,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=0.003,
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Digits(True),
        eval_dataset=Digits(False),
        callbacks=[PacelineCallback("bmuf_adam", period=8)],  # the line that paceline needs
    )
    trainer.train()
    found = accuracy(model)
    if trainer.is_world_process_zero():
        print(f"the workers read {found:.1%} of the test digits right")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
