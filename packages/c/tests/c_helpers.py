# SPDX-License-Identifier: Apache-2.0
"""The library by ctypes, tools that are compiled, and workers of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import paceline
import paceline_c
from paceline_c.build import Place

HERE = Path(__file__).parent
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = 1, 2, 3, 4
DTYPES = {"float32": FLOAT32, "float64": FLOAT64, "float16": FLOAT16}
DEADLINE_S = 150


def load(prefix: Path) -> Any:
    """The library, with the types of its arguments."""
    library = ctypes.CDLL(str(Place(prefix).library))
    text, whole, pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    for name, given in {
        "attach": [ctypes.c_int, pointer, pointer, pointer, text, text],
        "buffers": [ctypes.c_int, pointer, pointer, pointer],
        "momentum": [ctypes.c_int, pointer, ctypes.c_double],
        "set": [text, text],
        "mean": [pointer],
        "next_range": [whole, whole, pointer, pointer],
        "tuned": [text, ctypes.c_double, pointer],
        "tune": [text, ctypes.c_double],
        "log": [text, ctypes.c_double],
        "save": [text],
        "resume": [text],
    }.items():
        getattr(library, f"pl_{name}").argtypes = given
    library.pl_error.restype, library.pl_minibatches.restype = text, whole
    return library


def said(library: Any) -> str:
    """The last error."""
    return str(library.pl_error().decode())


def pointers(arrays: Sequence[Any]) -> Any:
    """What C calls `void *const *`."""
    return (ctypes.c_void_p * len(arrays))(*(one.ctypes.data for one in arrays))


def columns(arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Pointers, sizes and dtypes."""
    sizes = (ctypes.c_int64 * len(arrays))(*(one.size for one in arrays))
    kinds = (ctypes.c_int * len(arrays))(*(DTYPES[str(one.dtype)] for one in arrays))
    return pointers(arrays), sizes, kinds


def attach(library: Any, arrays: Sequence[Any], rule: str = "bmuf(period=4)", device: str = "cpu") -> int:
    """`pl_attach`."""
    return int(library.pl_attach(len(arrays), *columns(arrays), device.encode(), rule.encode()))


def next_range(library: Any, total: int, batch: int) -> tuple[int, int, int]:
    """Status, begin and end."""
    begin, end = ctypes.c_int64(-1), ctypes.c_int64(-1)
    return library.pl_next_range(total, batch, ctypes.byref(begin), ctypes.byref(end)), begin.value, end.value


def tuned(library: Any, name: str, preset: float) -> float:
    """The value of `pl_tuned`."""
    value = ctypes.c_double()
    assert library.pl_tuned(name.encode(), preset, ctypes.byref(value)) == 0, said(library)
    return value.value


def compiled(prefix: Path, source: str, folder: Path, *flags: str) -> Path:
    """A tool of the tests."""
    place, compiler = Place(prefix), "c++" if source.endswith(".cc") else "cc"
    made = folder / Path(source).stem
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", str(HERE / source), *place.cflags(), *flags]
    done = subprocess.run(
        [*command, *place.libs(), "-o", str(made)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return made


def environment(**more: str) -> dict[str, str]:
    """Of a tool that finds this paceline, in a checkout and installed."""
    roots = [str(Path(one.__file__).parents[1]) for one in (paceline, paceline_c)]
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*roots, known]), **more}


def run(command: Sequence[str | Path], code: int = 0, **more: str) -> str:
    """What a tool prints; it ends with `code`."""
    done = subprocess.run(
        list(map(str, command)), env=environment(**more), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def free_port() -> int:
    """A port below those that the kernel gives out, so that nobody gets it before worker 0 listens."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


def workers(command: Sequence[str | Path], count: int) -> list[tuple[int, str]]:
    """(exit code, what it prints) of each of `count` workers, started as torchrun starts them."""
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            list(map(str, command)),
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), PACELINE_TIMEOUT_S="60"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        found = [process.communicate(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (_, errors) in enumerate(found):
        print(f"worker {rank}: {errors}", file=sys.stderr)
    return [(process.returncode, out) for process, (out, _) in zip(started, found, strict=True)]


def targets(rank: int, step: int, size: int) -> Any:
    """Where worker `rank` is pulled to in a step, as worker.c has it."""
    return np.array([((7 * rank + 3 * step + 5 * k) % 11) / 4 for k in range(size)])
