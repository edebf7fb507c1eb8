# SPDX-License-Identifier: Apache-2.0
"""The program's files are rank 0's: what other workers write goes into a folder of their own, and is read from there.

Each worker finds what it wrote itself (such as the best model so far), and no two write the same file. Served is what
goes through Python's `open`, which `torch.save`, NumPy, PIL, matplotlib, csv, json and loggers use, and torch's and
safetensors' own writers. Files that native libraries open (HDF5, SQLite) are everybody's.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.zero.patches import Patches

FOLDER = "files"
"""In the log directory, for the files of all ranks but 0."""
OUTSIDE = ("/dev/", "/proc/", "/sys/")
"""What lies there is not a file."""


class Shadows:
    """Where this worker's files are.

    Args:
        logs: the run's log directory, in which everything is written as it is said.
        rank: of this worker.
    """

    def __init__(self, logs: Path, rank: int) -> None:
        self._logs, self._began = os.path.join(logs, ""), time.time()
        self._folder = logs / FOLDER / f"rank-{rank:03d}"

    def place(self, path: Any) -> Path | None:
        """Where this worker keeps its own file of that name; None for what is not kept apart."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith((*OUTSIDE, self._logs)):
            return None
        return self._folder / name.replace(":", "").lstrip("/\\")

    def to_write(self, path: Any, keeps: bool = False) -> Any:
        """The path to write to; `keeps`: what the file holds is wanted."""
        own = self.place(path)
        if own is None:
            return path
        if not os.path.isdir(os.path.dirname(os.path.abspath(os.fsdecode(path)))):
            return path  # the error is the program's own
        own.parent.mkdir(parents=True, exist_ok=True)
        if keeps and not own.exists() and self._was_there(path):
            shutil.copyfile(path, own)
        return own

    def _was_there(self, path: Any) -> bool:
        """Whether there was such a file before the run: else it is rank 0's, and more or less of it is there by now."""
        return os.path.isfile(path) and os.stat(path).st_mtime < self._began

    def to_read(self, path: Any) -> Any:
        """The worker's own file, where it wrote one."""
        own = self.place(path)
        return own if own is not None and own.exists() else path

    def opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`open`."""

        def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and set(mode) & set("wxa+"):
                return original(self.to_write(file, keeps="w" not in mode), mode, *args, **kwargs)
            return original(self.to_read(file), mode, *args, **kwargs)

        return opens

    def writing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes to the path that is its second argument."""

        def writes(*args: Any, **kwargs: Any) -> Any:
            for name in ("f", "filename"):
                if name in kwargs:
                    kwargs[name] = self.to_write(kwargs[name])
            return original(*args[:1], *(self.to_write(path) for path in args[1:2]), *args[2:], **kwargs)

        return writes

    def reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reads from the path that is its first argument."""

        def reads(path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self.to_read(path), *args, **kwargs)

        return reads

    def moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.replace` and `os.rename`: of a file that this worker wrote, to one that it keeps."""

        def moves(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            own = self.place(source)
            if own is not None and own.exists():
                return original(own, self.to_write(target), *args, **kwargs)
            return original(source, target, *args, **kwargs)

        return moves

    def removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.remove`: of this worker's own file; rank 0 removes the others."""

        def removes(path: Any, *args: Any, **kwargs: Any) -> Any:
            own = self.place(path)
            if own is None:
                return original(path, *args, **kwargs)
            return original(own, *args, **kwargs) if own.exists() else None

        return removes

    def install(self, patches: Patches) -> None:
        """Stand in for what writes and reads files."""
        for owner in (builtins, io):
            patches.replace(owner, "open", self.opening)
        for name in ("replace", "rename"):
            patches.replace(os, name, self.moving)
        for name in ("remove", "unlink"):
            patches.replace(os, name, self.removing)
        patches.replace(torch, "save", self.writing)
        patches.replace(torch.jit, "save", self.writing)
        patches.replace(torch, "load", self.reading)
        patches.replace(safetensors.torch, "save_file", self.writing)
        patches.replace(safetensors.torch, "load_file", self.reading)
