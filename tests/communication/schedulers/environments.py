# SPDX-License-Identifier: Apache-2.0
"""Environments as schedulers make them, copied from real ones (Slurm 22.05) or put together from the documentation."""

from __future__ import annotations


def batch(nodes: str, count: int) -> dict[str, str]:
    """A batch script, on the first node of its allocation."""
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_NNODES": str(count),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_TASKS_PER_NODE": f"4(x{count})" if count > 1 else "4",
        "SLURM_NTASKS": str(4 * count),
    }


def step(nodes: str, count: int, node: int, each: int = 1, local: int = 0) -> dict[str, str]:
    """A task that `srun` has started."""
    return {
        **batch(nodes, count),
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(each * count),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{count})" if count > 1 else str(each),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * each + local),
        "SLURM_LOCALID": str(local),
    }


def trainjob(node: int, count: int = 2, each: str = "auto") -> dict[str, str]:
    """A pod of Kubeflow Trainer's runtime for torch."""
    return {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": each,
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(node),
    }
