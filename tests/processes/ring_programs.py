# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_rings.py run: `python -m tests.processes.ring_programs NAME DIRECTORY [arguments]`."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import paceline
from paceline.communication import connect
from paceline.errors import PeerLostError
from tests.helpers import learn, make_data, make_net, momentum_sgd
from tests.processes.together import all_here

RANK = int(os.environ.get("RANK", "0"))
RULES: dict[str, dict[str, Any]] = {
    "sync": {"rule": "sync"},
    "ordered": {"rule": "sync", "reproducible": True},
    "bmuf": {"rule": "bmuf", "period": 2},
    "ordered_bmuf": {"rule": "bmuf", "period": 2, "reproducible": True},
    "one_bit": {"rule": "one_bit"},
}


def train(directory: Path, transport: str, tls: str | None) -> None:
    """A few steps under every rule, with what came out of it."""
    for name, settings in RULES.items():
        model = make_net()
        optimizer = momentum_sgd(model.parameters())
        x, y = make_data().tensors
        with paceline.attach(model, optimizer, transport=transport, tls=tls, timeout_s=60, **settings) as run:
            for k in range(4):
                at = slice(6 * (2 * k + RANK), 6 * (2 * k + RANK) + 6)
                learn(model, optimizer, x[at], y[at])
            assert run._transport.name == ("channel" if transport == "channel" else "gloo")
        if RANK == 0:
            save_file(model.state_dict(), directory / f"{transport}.{name}.{'tls' if tls else 'clear'}.safetensors")


def same(directory: Path, tls: str) -> None:
    """Over our sockets, first without any group and then beside one, and over gloo."""
    train(directory, "channel", None)
    assert not dist.is_initialized()
    train(directory, "auto", None)
    assert dist.is_initialized()
    train(directory, "channel", tls)


def lost(directory: Path, timeout_s: str) -> None:
    """Sum until somebody is missing, and say who."""
    all_here(directory)
    t = connect(float(timeout_s), None, "channel")
    x = torch.ones(1_000_000)
    t.all_reduce(x).wait()
    (directory / f"ready.{RANK}").touch()
    try:
        while True:
            t.all_reduce(x.fill_(1.0)).wait()
    except PeerLostError as error:
        print(error)
    t.close()


PROGRAMS: dict[str, Callable[..., None]] = {"same": same, "lost": lost}

if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
