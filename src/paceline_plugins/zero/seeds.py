# SPDX-License-Identifier: Apache-2.0
"""Random streams of a program: equal on all workers where it splits its data, different where it trains.

A program without a seed would draw a different split on every worker, and one worker would train on another's
validation samples. So several workers start from one seed, and generators constructed without a seed get theirs from a
common stream. Inside a training pass each worker draws from its own stream (dropout, augmentation); after the pass the
common stream continues where it stopped. A stream of samples that every worker reads as a whole draws from a stream of
the pass, alike on all workers, so that one which shuffles by itself has the same order on all. Seeds that the program
sets stay as they are. A single worker is not seeded.

Under `--random-data` the program draws its samples itself. What it makes before it first calls the model, such as a
data set, is the same on all workers. Then ranks other than 0 mix their rank into the states of all generators, and into
the seeds that the program sets from there on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from paceline.communication import virtual
from paceline.core import rng
from paceline.core.rng import mix
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker

VARIABLE = "PACELINE_SEED"
SHARED = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Variables that identify a launch: the same on all workers and after a restart."""
NOT_THE_PROGRAM = ("tempfile",)
"""Modules whose random names must differ between processes."""


def common(environment: Mapping[str, str]) -> int:
    """The seed that all workers start from: PACELINE_SEED, or a hash of the variables that identify the launch.

    Raises:
        ValueError: PACELINE_SEED is no number.
    """
    given = environment.get(VARIABLE)
    if given:
        return int(given)
    return mix(*(zlib.crc32(environment.get(name, "").encode()) for name in SHARED))


class Reading:
    """The random draws of a stream of samples in one pass: the same on all workers, which read all of it.

    Args:
        seed: gives the pass's, the same on all workers.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        self._seed, self._states = seed, _states()
        self.entropy = random.Random(0)
        """Gives the seeds of generators that the stream constructs without one."""
        self.pid = os.getpid()

    def begin(self) -> None:
        """The stream is iterated, perhaps again."""
        rng.seed_all(seed := self._seed())
        self.entropy = random.Random(mix(seed, 1))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Context in which the stream makes a batch."""
        own = _states()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(own)

    def in_loader_process(self) -> random.Random | None:
        """Seeds for generators in a process that was forked to read the stream."""
        info = get_worker_info()
        if self.pid != os.getpid() and info is not None:
            self.pid, self.entropy = os.getpid(), random.Random(info.seed)
        return self.entropy if info is not None else None


class Streams:
    """The random streams of one of several workers.

    Args:
        seed: the same on all workers.
        worker: this worker.
    """

    def __init__(self, seed: int, worker: ZeroWorker) -> None:
        self._worker, self._pid = worker, os.getpid()
        self._start, self._entropy = seed, random.Random(mix(seed, 1))
        self._parted = False
        self._passes, self._under_way = 0, 0
        self._outside: dict[str, Any] = {}
        self._base, self._over = 0, False
        self._reading: Reading | None = None  # whose stream makes a batch at present

    @property
    def apart(self) -> bool:
        """Whether each worker draws its own samples."""
        return self._worker.random_data

    def install(self, patches: Patches) -> None:
        """Seed the global generators, and patch the functions that draw seeds from the system."""
        torch.manual_seed(self._start)
        numpy.random.seed(self._start % 2**32)
        random.seed(self._start)
        patches.replace(numpy.random.bit_generator, "randbits", self._bits)  # NumPy generators without a seed
        patches.replace(numpy.random, "seed", self._given)
        patches.replace(random, "seed", self._given)
        patches.replace(random.Random, "seed", self._method)
        for owner in (torch, torch.random):
            patches.replace(owner, "seed", self._drawn)
        for owner, name in (
            (torch, "manual_seed"),
            (random, "seed"),
            (numpy.random, "seed"),
            (numpy.random, "default_rng"),
        ):
            if self.apart and self._worker.rank:
                patches.replace(owner, name, self._mixed)

    # -- samples that the program draws itself ----------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether this worker shall draw samples of its own, and does not yet."""
        return self.apart and not self._parted

    def part(self) -> None:
        """The program calls its model: from now on this worker draws samples of its own, if it shall at all."""
        if not self.waits:
            return
        self._parted = True
        if self._worker.rank:
            others = _generators() if virtual.current() is None else [self._entropy]  # they share a process
            own = mix(*positions(), self._worker.rank)
            torch.manual_seed(own)
            numpy.random.seed(own % 2**32)
            random.seed(own)
            for generator in others:
                _reseed(generator, self._worker.rank)

    def _mixed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that takes a seed."""

        def seeds(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            own = mix(int(seed), self._worker.rank) % 2**32 if self._parted and isinstance(seed, int) else seed
            return original(own, *args, **kwargs)

        return seeds

    # -- seeds that the program does not set ------------------------------------------------------

    def _source(self) -> random.Random | None:
        """Gives seeds alike on all workers; None in a training pass, and in loader processes, except to streams."""
        if os.getpid() != self._pid:
            return None if self._reading is None else self._reading.in_loader_process()
        if self._reading is not None:
            return self._reading.entropy
        return None if self._under_way else self._entropy

    def _bits(self, original: Callable[[int], int]) -> Callable[[int], int]:
        def randbits(number: int) -> int:
            source = self._source()
            return original(number) if source is None else source.getrandbits(number)

        return randbits

    def _given(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if value is None and (source := self._source()) is not None:
                value = source.getrandbits(32)
            return original(value, *args, **kwargs)

        return seed

    def _method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(generator: random.Random, value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if value is None and not _of_a_library() and (source := self._source()) is not None:
                value = source.getrandbits(64)
            return original(generator, value, *args, **kwargs)

        return seed

    def _drawn(self, original: Callable[[], int]) -> Callable[[], int]:
        def seed() -> int:
            source = self._source()
            if source is None:
                return original()
            number = source.getrandbits(63)
            torch.manual_seed(number)
            return number

        return seed

    # -- inside and outside of training -----------------------------------------------------------

    def enter(self) -> None:
        """A training pass begins: this worker draws from its own stream."""
        self._under_way += 1
        if self._under_way > 1 or self.apart:
            return
        self._outside = rng.capture()
        self._passes += 1
        before = positions()
        self._base = mix(*before, self._passes)
        # each from its own state, so that a generator that the program seeds repeats, whatever it leaves unseeded
        of_torch, of_numpy, of_python = (mix(one, self._passes, self._worker.rank) for one in before)
        torch.manual_seed(of_torch)
        numpy.random.seed(of_numpy % 2**32)
        random.seed(of_python)

    def leave(self) -> None:
        """It is over: the common stream continues."""
        self._under_way -= 1
        if self._under_way or not self._outside or self._over:
            return
        if torch.cuda.is_available() and "cuda" not in self._outside:
            torch.cuda.manual_seed_all(mix(self._start, self._passes))
        rng.restore(self._outside)
        self._outside = {}

    def reading(self, epoch: Callable[[], int]) -> Reading | None:
        """The draws of a stream that every worker reads as a whole; None if each draws its own samples.

        Args:
            epoch: gives the number of the stream's pass.
        """
        base = self._base
        return None if self.apart else Reading(lambda: mix(base, epoch()))

    @contextlib.contextmanager
    def read(self, reading: Reading) -> Iterator[None]:
        """Context in which a stream makes a batch."""
        before, self._reading = self._reading, reading
        try:
            with reading.context():
                yield
        finally:
            self._reading = before

    def read_again(self) -> None:
        """A stream is iterated, perhaps again."""
        if self._reading is not None:
            self._reading.begin()

    def close(self) -> None:
        """The program has ended: an open pass that is garbage-collected later must not restore generators."""
        self._over = True


def _states() -> tuple[Any, Any, Any]:
    """Of the generators that a stream may draw from; it runs on the CPU."""
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])


def positions() -> tuple[int, int, int]:
    """Checksums of the states of torch's, NumPy's and Python's global generators."""
    _, keys, position, *_ = numpy.random.get_state()
    return (
        zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        zlib.crc32(numpy.asarray(keys).tobytes() + str(position).encode()),
        zlib.crc32(repr(random.getstate()).encode()),
    )


def _of_a_library() -> bool:
    """Whether a library constructs the generator, for names that must differ between processes."""
    frame = sys._getframe(2)
    for _ in range(3):  # a virtual worker's choice, and `Random.__init__`, stand between
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in NOT_THE_PROGRAM:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _generators() -> list[Any]:
    """The generators that the program holds, but for those of loaders, which draw an order that the workers share."""
    things = gc.get_objects()
    held = [one for one in gc.get_referents(*things) if isinstance(one, torch.Generator)]
    orders = {id(vars(one).get("generator")) for one in things if isinstance(one, (DataLoader, Sampler))}
    known = (numpy.random.Generator, numpy.random.RandomState, random.Random)
    found = {id(one): one for one in (*held, *(one for one in things if isinstance(one, known)))}
    common = {torch.default_generator, *torch.cuda.default_generators, numpy.random.mtrand._rand, random._inst}
    return [one for one in found.values() if id(one) not in orders and one not in common]


def _reseed(generator: Any, rank: int) -> None:
    """Mix the rank into a generator's state."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(mix(zlib.crc32(generator.get_state().numpy().tobytes()), rank))
    elif isinstance(generator, random.Random):
        if not isinstance(generator, random.SystemRandom):
            generator.seed(mix(zlib.crc32(repr(generator.getstate()).encode()), rank))
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(mix(zlib.crc32(repr(generator.get_state()).encode()), rank) % 2**32)
    else:
        source = generator.bit_generator
        source.state = type(source)(mix(zlib.crc32(repr(source.state).encode()), rank)).state
