# SPDX-License-Identifier: Apache-2.0
"""For processes that tests and quick claims start, with this folder in PYTHONPATH: they leave out what takes longer
than the rest of most such processes.

They load `torch._dynamo` when they use it, and not when they make their first optimizer. While they import a framework
no garbage is collected, and later collections, of which an interpreter makes some as it ends, leave out the many
objects of the framework: they stay to the end.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
FRAMEWORKS = {"torch", "jax", "keras", "lightning", "transformers", "accelerate", "sklearn", "matplotlib"}
"""Frameworks."""


class Part:
    """A module of `torch._dynamo`: what is `known` of it before it is loaded."""

    def __init__(self, name: str, **known: Callable[[], Any]) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{NAME}.{self._name}"), name)


class Unloaded(ModuleType):
    """Does what optimizers, groups of processes and DDP ask of `torch._dynamo`; anything else loads it."""

    __file__ = None
    __path__ = ()
    trace_rules = Part("trace_rules", clear_lru_cache=lambda: None)
    utils = Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def disable(self, fn: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Callable[..., Any]:
        return fn if fn is not None else lambda function: function

    def graph_break(self, *message: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load(), name)


def load() -> ModuleType:
    """Load the real one."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        sys.modules.pop(NAME)
    return importlib.import_module(NAME)


class Finder(MetaPathFinder, Loader):
    """Finds `torch._dynamo`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{NAME}."):
            load()  # with this part of it
        return ModuleSpec(name, self) if name.startswith(NAME) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Unloaded(NAME) if spec.name == NAME else importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Uncollected(MetaPathFinder):
    """Finds frameworks; no garbage is collected while one is imported, and what is there after that stays."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in FRAMEWORKS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            @functools.wraps(run)
            def quietly(module: ModuleType) -> None:
                before = gc.isenabled()
                gc.disable()
                try:
                    run(module)
                finally:
                    gc.freeze()
                    if before:
                        gc.enable()

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


FINDER = Finder()
sys.meta_path[:0] = [FINDER, Uncollected()]
