# SPDX-License-Identifier: Apache-2.0
"""Workers that keep others waiting: `python -m tests.processes.waiting_programs NAME DIRECTORY`."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from tests.helpers import attached, descend, make_net, sgd
from tests.processes.together import run_named

RANK = int(os.environ.get("RANK", "0"))


def hang_here(directory: Path) -> None:
    """What a user's own loop does that never ends."""
    (directory / f"there.{RANK}").touch()
    while True:
        time.sleep(0.01)


def apart(directory: Path) -> None:
    """Rank 0 trains on; 1 hangs in its own code, 2 waits for a message, 3 and 4 are dealt with from outside."""
    model = make_net()
    optimizer = sgd(model.parameters())
    run = paceline.attach(model, optimizer, "bmuf(period=2)", timeout_s=12, log=directory / "log")
    with run:
        for step in range(1000):
            descend(model, optimizer, torch.randn(4, 6))
            if step == 6:
                break
        if RANK == 1:
            hang_here(directory)
        (directory / f"there.{RANK}").touch()
        if RANK == 2:
            run.messages.receive(torch.zeros(3), 0).wait()
        if RANK == 3:
            hang_here(directory)
        if RANK == 4:
            time.sleep(60)
        try:
            while True:
                optimizer.step()
        except paceline.PeerLostError as error:
            (directory / f"error.{RANK}").write_text(str(error))
            raise


def leaves(directory: Path) -> None:
    """Attached and closed several times: no thread stays behind, and the process ends by itself."""
    for _ in range(3):
        with attached(make_net(), "bmuf(period=1)", timeout_s=30) as (_, model, optimizer):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            assert sum(t.name == "paceline-responder" for t in threading.enumerate()) == 1
        assert not any(t.name == "paceline-responder" for t in threading.enumerate())


def elsewhere(directory: Path) -> None:
    """Calls that rank 0 makes alone, one after another on connections of their own: a sentence each, and no abort."""
    calls: dict[str, Callable[[paceline.Run], Any]] = {
        "run.save": lambda run: run.save(directory / "saved"),
        "run.messages.all_gather": lambda run: run.messages.all_gather(torch.ones(2, 3), torch.ones(3)).wait(),
        "run.merge": lambda run: run.merge(),
        "run.messages.gather": lambda run: run.messages.gather("word"),
    }
    rules = ("bmuf(period=2)", "sync", "bmuf(period=2, overlap=2)")
    for rule, (name, call) in itertools.product(rules, calls.items()):
        if (rule, name) == ("sync", "run.merge"):
            continue
        model = make_net()
        optimizer = sgd(model.parameters())
        run = paceline.attach(model, optimizer, rule, timeout_s=60)
        try:
            for step in range(30):
                descend(model, optimizer, torch.randn(4, 6))
                if step == 5 and RANK == 0:
                    call(run)
        except paceline.MismatchError as error:
            run.abandon()
            with (directory / f"said.{RANK}").open("a") as file:
                file.write(f"{rule} {name}: {error}\n")


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
