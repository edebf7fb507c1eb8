# SPDX-License-Identifier: Apache-2.0
"""Counts what a training program does, from outside of it and of paceline: a line of JSON for each event.

Python imports this file by itself where its folder is on PYTHONPATH. In a worker (`RANK` is set, when Python starts or
after a fork) and in a program that runs alone (`FOREIGN_ALONE`), it notes in `FOREIGN_COUNTS/RANK-PID.jsonl`:

    item    a sample was fetched from a data set: the set's class and length, the index; alone also in which pass
    over    alone: a pass over a DataLoader came to its end
    step    an optimizer made a step: which, its rates, how many numbers it trains; alone also in which pass
    save    torch.save wrote: the path, a digest of the tensors
    write   a file was opened to be written: its path
    end     a digest of what each optimizer trains, at the end of the process

The originals of what it needs are taken before anybody else stands in for them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

FOLDER = os.environ.get("FOREIGN_COUNTS", "")
ALONE = "FOREIGN_ALONE" in os.environ
CONTAINERS = ("Subset", "ConcatDataset", "ChainDataset")
"""Data sets that fetch from others, which are counted."""
_putenv, _open, _write, _getpid, _join, _mkdirs = os.putenv, os.open, os.write, os.getpid, os.path.join, os.makedirs
_dumps, _abspath, _fsdecode = json.dumps, os.path.abspath, os.fsdecode


class Journal:
    """Where this process notes; a forked one has a file of its own."""

    def __init__(self) -> None:
        self._pid, self._fd = -1, -1
        self._rank = os.environ.get("RANK", "0" if ALONE else "")

    def putenv(self, name: bytes, value: bytes) -> None:
        """A forked worker is given its rank, which is hidden from the program later."""
        if name == b"RANK":
            self._rank = value.decode()
        _putenv(name, value)

    def note(self, kind: str, **about: Any) -> None:
        """One event."""
        if not self._rank:  # a launcher
            return
        if self._pid != _getpid():
            self._pid = _getpid()
            name = _join(FOLDER, f"{int(self._rank):03d}-{self._pid}.jsonl")
            self._fd = _open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _write(self._fd, (_dumps({"k": kind, **about}) + "\n").encode())


journal = Journal()
depth = threading.local()
passes: list[int] = []  # under way, the one that was asked last at the end
made: list[weakref.ref[Any]] = []  # optimizers


def number(index: Any) -> Any:
    """An index as JSON has it."""
    return index.tolist() if hasattr(index, "tolist") else index if isinstance(index, (int, str)) else repr(index)


def counted(get: Callable[..., Any]) -> Callable[..., Any]:
    """`__getitem__` of a data set."""

    @functools.wraps(get)
    def getitem(data: Any, index: Any) -> Any:
        inside, depth.inside = getattr(depth, "inside", 0), 1
        try:
            found = get(data, index)
        finally:
            depth.inside = inside
        if not inside:
            note_item(data, index)
        return found

    return getitem


def note_item(data: Any, index: Any) -> None:
    """A sample was fetched."""
    length = vars(data).get("counted_length", -1) if hasattr(data, "__dict__") else -1
    if length < 0:
        with contextlib.suppress(TypeError, AttributeError):
            length = data.counted_length = len(data)  # asked once, before paceline looks who asks for it
    for each in map(number, index) if isinstance(index, list) else [number(index)]:
        journal.note("item", d=f"{type(data).__name__}:{length}", i=each, p=passes[-1] if passes else None)


def count_data(torch: Any) -> None:
    """Data sets, those that are no class of torch's where the loader fetches from them."""
    from torch.utils.data import _utils

    base = torch.utils.data.Dataset
    for known in (torch.utils.data.TensorDataset,):
        known.__getitem__ = counted(known.__getitem__)

    def noticed(cls: Any, **kwargs: Any) -> None:
        object.__init_subclass__(**kwargs)
        ours = cls.__module__.startswith("paceline")
        if "__getitem__" in vars(cls) and cls.__name__ not in CONTAINERS and not ours:
            cls.__getitem__ = counted(cls.__getitem__)

    base.__init_subclass__ = classmethod(noticed)
    fetcher = _utils.fetch._MapDatasetFetcher
    fetch = fetcher.fetch

    def fetching(self: Any, indices: Any) -> Any:
        if not isinstance(self.dataset, base) and not getattr(self.dataset, "counted", False):
            for index in indices if isinstance(indices, (list, tuple)) else [indices]:
                note_item(self.dataset, index)
        return fetch(self, indices)

    fetcher.fetch = fetching


class Pass:
    """A pass over a loader of a program that is alone: which samples it had, which steps were made in it."""

    count = 0

    def __init__(self, inner: Iterator[Any]) -> None:
        Pass.count += 1
        self._number, self._inner = Pass.count, inner

    def __iter__(self) -> Pass:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self._number in passes:
            passes.remove(self._number)
        passes.append(self._number)
        try:
            return next(self._inner)
        except StopIteration:
            passes.remove(self._number)
            journal.note("over", p=self._number)
            raise

    def __del__(self) -> None:
        if self._number in passes:
            passes.remove(self._number)


def count_passes(torch: Any) -> None:
    """Alone: samples are fetched in this process, pass by pass."""
    loader = torch.utils.data.DataLoader
    begin, make = loader.__iter__, loader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context"):
            kwargs.pop(name, None)
        make(self, *args, **kwargs)

    loader.__init__ = init
    loader.__iter__ = lambda self: Pass(begin(self))


def count_steps(torch: Any) -> None:
    """Optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in numbers:
            numbers[optimizer] = len(made)
            made.append(weakref.ref(optimizer))
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        name = f"{type(optimizer).__name__}#{numbers[optimizer]}"
        journal.note("step", o=name, lr=rates, n=size, p=passes[-1] if passes else None)

    register_optimizer_step_post_hook(stepped)


def digest(thing: Any) -> str:
    """Of the tensors in it, in their order."""
    found = hashlib.sha256()
    for tensor in tensors(thing):
        found.update(tensor.detach().cpu().contiguous().view(-1).float().numpy().tobytes())
    return found.hexdigest()[:16]


def tensors(thing: Any) -> Iterator[Any]:
    """Of a model, a state dictionary, or what has them."""
    import torch

    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from tensors(dict(thing.state_dict()))
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from tensors(each)
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from tensors(each)


def model_of(thing: Any) -> Any:
    """What of a checkpoint is the model: optimizers' states, and what was seen best, are a worker's own."""
    if isinstance(thing, dict):
        named = [
            each for name, each in thing.items() if str(name) in ("model", "state_dict", "net", "model_state_dict")
        ]
        return named or {name: each for name, each in thing.items() if "optim" not in str(name).lower()}
    return thing


def count_files(torch: Any) -> None:
    """What is saved."""
    save = torch.save

    @functools.wraps(save)
    def saving(thing: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _abspath(_fsdecode(f)) if isinstance(f, (str, bytes, os.PathLike)) else getattr(f, "name", "")
        journal.note("save", path=str(path), h=digest(model_of(thing)))
        return save(thing, f, *args, **kwargs)

    torch.save = saving


def note_writes() -> None:
    """Files that are opened to be written."""
    opens, os_open = builtins.open, os.open

    @functools.wraps(opens)
    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wxa+") and isinstance(file, (str, bytes, os.PathLike)):
            journal.note("write", path=_abspath(_fsdecode(file)))
        return opens(file, mode, *args, **kwargs)

    @functools.wraps(os_open)
    def os_opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and isinstance(path, (str, bytes, os.PathLike)):
            journal.note("write", path=_abspath(_fsdecode(path)))
        return os_open(path, flags, *args, **kwargs)

    builtins.open = io.open = opening
    os.open = os_opening


def at_end() -> None:
    """What the optimizers train, as it is."""
    for reference in made:
        optimizer = reference()
        if optimizer is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            journal.note("end", o=type(optimizer).__name__, h=digest(trained))


def install(torch: Any) -> None:
    """After torch was imported."""
    count_data(torch)
    count_steps(torch)
    count_files(torch)
    if ALONE:
        count_passes(torch)


def install_keras(keras: Any) -> None:
    """After Keras was imported: its own optimizers' steps, and the rows that `fit` is given; digits that are there."""
    import keras_pictures

    keras.datasets.mnist.load_data = keras_pictures.mnist
    apply, fit = keras.optimizers.Optimizer.apply, keras.Model.fit

    def applying(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = apply(optimizer, *args, **kwargs)
        journal.note("step", o=f"keras.{type(optimizer).__name__}", lr=[float(optimizer.learning_rate)], p=None)
        return found

    def fitting(model: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        for row in x if hasattr(x, "shape") else ():
            journal.note("item", d="fit", i=hashlib.sha256(row.tobytes()).hexdigest()[:16], p=None)
        return fit(model, x, *args, **kwargs)

    keras.optimizers.Optimizer.apply, keras.Model.fit = applying, fitting


def install_datasets(datasets: Any) -> None:
    """After Hugging Face's datasets were imported: their samples, one at a time or several."""
    if not hasattr(datasets, "load_dataset"):  # a module of the program
        return
    one, several = datasets.Dataset.__getitem__, datasets.Dataset.__getitems__

    def getitem(data: Any, index: Any) -> Any:
        if isinstance(index, int):
            note_item(data, index)
        return one(data, index)

    def getitems(data: Any, indices: Any) -> Any:
        note_item(data, list(indices))
        return several(data, indices)

    datasets.Dataset.__getitem__, datasets.Dataset.__getitems__ = getitem, getitems
    datasets.Dataset.counted = True


class After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function when a library has been imported."""

    def __init__(self, library: str, then: Callable[[Any], None]) -> None:
        self._library, self._then, self._looking = library, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Of the library, whose loader does its work first; also for who only asks whether it is there."""
        if name != self._library or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executing(module: Any) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = executing  # type: ignore[method-assign]
        return spec


def run_the_hidden() -> None:
    """Run the file of this name that stands further down the path; Python takes the first one only."""
    mine = os.path.realpath(os.path.dirname(__file__))
    rest = [path for path in sys.path if os.path.realpath(path) != mine]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_the_hidden()
if FOLDER:
    _mkdirs(FOLDER, exist_ok=True)
    os.putenv = journal.putenv
    note_writes()
    atexit.register(at_end)
    sys.meta_path[:0] = [After("torch", install), After("keras", install_keras), After("datasets", install_datasets)]
