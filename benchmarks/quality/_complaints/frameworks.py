# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Lightning, transformers and accelerate with paceline's adapters, and alone without them."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import warnings

import torch

from _complaints.cases import case, right
from _complaints.helpers import ALONE, B, flat, mse, net, note, points


@case("huggingface/transformers#37766", right("w", "steps", "rate"), limit_s=600)
def transformers_accumulation() -> None:
    """the Trainer with accumulation and a linear schedule: its steps, its rate at the end, and the mean of gradients"""
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            return {"loss": mse(self.net(x), labels)}

    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

    data = [{"x": x, "labels": y} for x, y, _ in points()]
    several = []
    if not ALONE:
        from paceline.doors.adapters.hugging_face import PacelineCallback

        several = [PacelineCallback("sync")]
    how = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 0.05, "optim": "sgd"}
    quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 1000, "disable_tqdm": True, "use_cpu": True}
    model, count = Net(), Count()
    arguments = TrainingArguments("out", per_device_train_batch_size=B, seed=1, **how, **quiet)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[count, *several])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    trainer.train()
    note(w=flat(model), steps=count.steps, rate=trainer.lr_scheduler.get_last_lr()[0])
