# SPDX-License-Identifier: Apache-2.0
"""Writes down when a worker's first optimizer step was over, and the step after its first exchange.

Python imports this at its start where the folder is on PYTHONPATH, so the programs need no line for it. Nothing happens
before `torch.optim` is imported, and never without FRONT_DOORS_MARKS. A mark is a file NAME-PID with the time in it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
from typing import Any

FOLDER = os.environ.get("FRONT_DOORS_MARKS", "")
PERIOD = int(os.environ.get("FRONT_DOORS_PERIOD", "8"))
WAIT_S = 600  # for the one who ends us
real_open, real_replace = open, os.replace  # zero lines give other ranks than 0 files of their own
steps = 0
written: set[str] = set()
peers: list[Any] = []


def write(name: str) -> None:
    if name not in written:
        written.add(name)
        now = time.time()
        path = os.path.join(FOLDER, f"{name}-{os.getpid()}")
        with real_open(path + ".new", "w") as file:
            file.write(repr(now))
        real_replace(path + ".new", path)


def exchanged() -> bool:
    """Whether the first exchange is behind this step: hivemind decides by samples, the others by steps."""
    if "hivemind" not in sys.modules:
        return steps > PERIOD
    if not peers:  # the step is of the optimizer inside hivemind's, which torch's hooks do not know
        peers.extend(one for one in gc.get_objects() if type(one).__module__ == "hivemind.optim.optimizer")
    # at 1 the first averaging begins in the background, before 2 it has been waited for
    return any(getattr(one, "local_epoch", 0) >= 2 for one in peers)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global steps
    steps += 1
    write("first")
    if exchanged():
        write("exchange")
        if "FRONT_DOORS_STOP" in os.environ:  # nobody needs the rest
            time.sleep(WAIT_S)
            os._exit(1)


class Finder:
    """Registers the hook when torch's optimizers have been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(after_step)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
