# SPDX-License-Identifier: Apache-2.0
"""Hides the cluster from a program that is written for one device.

The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, a scheduler's) are set only while the rule attaches. Only
paceline and torch see torch.distributed as initialized: another library that checks it would start collectives of its
own between paceline's. So would torch's layers (`SyncBatchNorm`), and its loaders would split a stream a second time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed

from paceline.communication import schedulers
from paceline.run.run import Run
from paceline_plugins.zero import callers, refusals
from paceline_plugins.zero.patches import Patches

INSIDERS = ("paceline", "torch")
OUTSIDERS = ("torch.nn.modules.", "torch.utils.data.")
"""Modules of torch that behave as on one device."""


class HiddenCluster:
    """Hides the cluster from the program.

    Args:
        where: says where in the program something happens.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self._hidden: dict[str, str] = {}

    def install(self, patches: Patches) -> None:
        """Hide it until the patches are undone."""
        environment = dict(os.environ)
        left = schedulers.alone(environment)
        self._hidden = {name: value for name, value in environment.items() if name not in left}
        patches.callback(os.environ.update, self._hidden)
        self._hide()
        patches.replace(Run, "__init__", self._connecting)  # zero lines attach, or a library of the program
        if torch.distributed.is_available():
            patches.replace(torch.distributed, "is_initialized", self._initialized)
            patches.replace(torch.distributed, "init_process_group", self._starting)

    def _hide(self) -> None:
        for name in self._hidden:
            os.environ.pop(name, None)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the launcher's variables are set, to connect from them."""
        os.environ.update(self._hidden)
        try:
            yield
        finally:
            self._hide()

    def _connecting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def connecting(*args: Any, **kwargs: Any) -> None:
            with self.shown():
                original(*args, **kwargs)

        return connecting

    def _initialized(self, original: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: bool(_asked_by_an_insider() and original())

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if _asked_by_an_insider():
                return original(*args, **kwargs)
            raise refusals.distributed(self._where())

        return init_process_group


def _asked_by_an_insider() -> bool:
    """Whether the caller's caller is paceline or torch."""
    name = callers.calling_module(1)
    return name.split(".")[0] in INSIDERS and not name.startswith(OUTSIDERS)
