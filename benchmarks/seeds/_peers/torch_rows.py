# SPDX-License-Identifier: Apache-2.0
"""torch's own: nothing exchanged, DistributedDataParallel, and FSDP2 with each layer a unit."""

from __future__ import annotations

import torch.distributed as dist
from _emulate import EmulatedModel, plain_step, sgd
from torch.nn.parallel import DistributedDataParallel

from .fleet import Place
from .setting import Setting, Trainer


def no_exchange(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """What the shared processors alone take away."""
    return Trainer(plain_step(model, sgd(model)))


def ddp(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """As many buckets as a model of 102 MB has with torch's default of 25 MB."""
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb(setting))
    return Trainer(plain_step(wrapped, sgd(model)))


def bucket_mb(setting: Setting) -> float:
    """A quarter of the model."""
    return 4 * setting.parameters / 4 / 2**20


def fsdp2(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Parameters sharded over all workers and gathered twice a step, once forward and once backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (place.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(plain_step(model, sgd(model)))
