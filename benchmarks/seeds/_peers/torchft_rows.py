# SPDX-License-Identifier: Apache-2.0
"""torchft with its lighthouse and a manager for each worker, which is a replica group of one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from _emulate import EmulatedModel, plain_step, sgd
from torch import nn

from .fleet import Place
from .setting import Setting, Trainer, outer
from .torch_rows import bucket_mb

PORT = 29510
TIMEOUT = timedelta(seconds=60)


def lighthouse(place: Place) -> tuple[Any, str]:
    """Serve quorums on this host; the server, and its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=place.size, join_timeout_ms=10_000)
    return server, f"http://{place.address}:{PORT}"


def manager(model: nn.Module, optimizer: Any, place: Place, asynchronous: bool) -> tuple[Any, Any]:
    """A worker's manager, and the store that it needs."""
    from torchft import Manager, ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    made = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=place.size,
        use_async_quorum=asynchronous,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=place.address,
        store_port=store.port,
        lighthouse_addr=place.service,
        replica_id=f"worker{place.rank}_",
        hostname=place.address,
    )
    return made, store


def ddp(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Its DistributedDataParallel and its optimizer, the quorum asynchronous."""
    from torchft import DistributedDataParallel, Optimizer

    inner = sgd(model)
    made, store = manager(model, inner, place, asynchronous=True)
    wrapped = DistributedDataParallel(made, model, bucket_cap_mb=bucket_mb(setting))
    return Trainer(plain_step(wrapped, Optimizer(made, inner)), made.current_step, store)


def local_sgd(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Parameters averaged once a block."""
    from torchft.local_sgd import LocalSGD

    inner = sgd(model)
    made, store = manager(model, inner, place, asynchronous=False)
    LocalSGD(made, model, inner, sync_every=setting.period).__enter__()
    return Trainer(plain_step(model, inner), made.current_step, store)


def diloco(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """The whole model once a block."""
    return _diloco(model, setting, place, [model], 0)


def overlap(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """The same in the background, for all steps of a block but one, the most that it allows."""
    return _diloco(model, setting, place, [model], setting.period - 1)


def streaming(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Fragments in turn, each in the background."""
    each = setting.layers // setting.fragments
    parts = [nn.Sequential(*model.layers[k * each : (k + 1) * each]) for k in range(setting.fragments)]
    return _diloco(model, setting, place, parts, setting.fragment_overlap)


def _diloco(
    model: EmulatedModel, setting: Setting, place: Place, parts: Sequence[nn.Module], delay_steps: int
) -> Trainer:
    from torchft.local_sgd import DiLoCo

    inner = sgd(model)
    made, store = manager(model, inner, place, asynchronous=False)
    outers = [outer(part) for part in parts]
    DiLoCo(made, list(parts), inner, outers, sync_every=setting.period, fragment_sync_delay=delay_steps).__enter__()
    return Trainer(plain_step(model, inner), lambda: made.current_step() / len(parts), store)
