# SPDX-License-Identifier: Apache-2.0
"""Runs a program as Python would, under zero lines."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType

import torch

from paceline.communication import schedulers
from paceline.communication.diagnosis import own_traceback
from paceline.update.engine.exit_handling import succeeded
from paceline_plugins.zero import module_file, seeds
from paceline_plugins.zero.attachment import Zero
from paceline_plugins.zero.file_redirection import redirect_files
from paceline_plugins.zero.journal import Journal
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.ports import Ports
from paceline_plugins.zero.rank_discovery import ZeroWorker, from_environment, start
from paceline_plugins.zero.reporter import Reporter
from paceline_plugins.zero.seeds import Streams


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name."""
    module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else None
    if module is not None:
        arguments = [str(module_file.find(module)[0]), *arguments[2:]]
    if not arguments or not Path(arguments[0]).is_file():
        given = repr(arguments[0]) if arguments else "none"
        raise SystemExit(
            f"give a program that is there, got {given}: python -m paceline_plugins.zero train.py [ARGUMENTS]"
        )
    script = Path(arguments[0])
    worker = from_environment(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = schedulers.own_device(worker.local_rank, worker.size, visible, torch.cuda.device_count())
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    sys.excepthook = _hook(script)
    with Patches() as patches, zero_lines(script, worker, patches):
        run_as_main(script, arguments, module)


@contextlib.contextmanager
def zero_lines(script: Path, worker: ZeroWorker, patches: Patches, began: float | None = None) -> Iterator[None]:
    """Context around the program of one worker.

    Args:
        script: the program.
        worker: this worker.
        patches: takes the patches of libraries while the program runs.
        began: when the workers began, if they are virtual workers of this process.
    """
    streams = Streams(seeds.common(os.environ), worker) if worker.size > 1 else None
    zero = Zero(script, worker, Reporter(worker), streams)
    if worker.size > 1:
        when, logs = start(worker, os.environ) if began is None else (began, worker.log or Path(tempfile.mkdtemp()))
        redirect_files(worker.log or logs, worker.rank, Journal(logs, when), patches, alone=began is None)
    if worker.rank:
        Ports().install(patches)
    if streams is not None:
        streams.install(patches)
    zero.install(patches)
    ended: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as error:
            if not succeeded(error.code):
                if zero.run is not None:
                    zero.run.abandon(error)
                raise
            ended = error
        zero.finish()
        if ended is not None:
            raise ended
    finally:
        if streams is not None:
            streams.close()


def run_as_main(script: Path, arguments: Sequence[str], module: str | None = None) -> None:
    """Run it as Python runs a script: a fresh `__main__`, the script's folder first on the path, its own arguments.

    A `module` runs as under `python -m`: the path begins with the working directory.
    """
    code = compile(script.read_bytes(), str(script), "exec")
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.argv = list(arguments)
    if module is None:
        sys.path[0] = str(script.resolve().parent)
    else:
        main.__spec__ = _spec(module)
        main.__package__ = main.__spec__.parent
    sys.modules["__main__"] = main  # spawned loader processes look it up here
    exec(code, main.__dict__)


def _spec(name: str) -> ModuleSpec:
    """Of the module that `python -m name` runs; a package's is its `__main__`. Imports the packages around it."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None  # its file was found
    return spec


def _hook(script: Path) -> Callable[..., None]:
    """An `excepthook` that prints an error by `own_traceback`."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(own_traceback(script, kind, error, trace), end="", file=sys.stderr, flush=True)

    return show
