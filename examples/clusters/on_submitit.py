# SPDX-License-Identifier: Apache-2.0
"""Training begun from Python on Slurm, with submitit; `--local` tries it on this machine.

::

    python examples/clusters/on_submitit.py --nodes 2 --tasks 4 --partition gpu
    python examples/clusters/on_submitit.py --local --tasks 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import submitit

FOLDER = Path("submitit-%j")


def work(rule: str) -> tuple[int, float]:
    """What every task runs. submitit exports torch.distributed's variables, from which paceline knows the rest."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    from train import train

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return train(epochs=2, rule=rule, checkpoint=None)


def submit(folder: Path, local: bool, nodes: int, tasks: int, partition: str | None) -> list[tuple[int, float]]:
    """Run `tasks` workers on each of `nodes` nodes; what they return, in rank order."""
    executor = submitit.AutoExecutor(folder, cluster="local" if local else "slurm")
    executor.update_parameters(nodes=nodes, tasks_per_node=tasks, timeout_min=60)
    if partition is not None:
        executor.update_parameters(slurm_partition=partition)
    found: list[tuple[int, float]] = executor.submit(work, "bmuf(period=4)").results()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--partition")
    wishes = parser.parse_args()
    for size, loss in submit(wishes.folder, wishes.local, wishes.nodes, wishes.tasks, wishes.partition):
        print(f"one of {size} workers ended with a loss of {loss:.3f}")
