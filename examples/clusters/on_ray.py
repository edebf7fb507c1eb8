# SPDX-License-Identifier: Apache-2.0
"""Training on a Ray cluster, with Ray Train's `TorchTrainer`; on one machine where there is none.

Ray starts the workers, and has made torch's process group when the function begins: `attach` uses it.

::

    python examples/clusters/on_ray.py --workers 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def work(wishes: dict[str, Any]) -> None:
    """What every worker runs."""
    import ray.train

    sys.path.insert(0, wishes["folder"])
    from train import train

    size, loss = train(wishes["epochs"], wishes["rule"], checkpoint=None)
    ray.train.report({"workers": size, "loss": loss})


def submit(workers: int, storage: str) -> None:
    """Run on the Ray cluster of this process, to the end; what the workers print is printed here."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(Path(__file__).parent.resolve()), "epochs": 2, "rule": "bmuf(period=4)"},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),  # with GPUs: leave it out, and use_gpu=True
        run_config=RunConfig(storage_path=storage),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", type=Path, default=Path("ray-results"))
    asked = parser.parse_args()
    submit(asked.workers, str(asked.storage.resolve()))
