# SPDX-License-Identifier: Apache-2.0
"""mpi4py and the MPI under it.

MPI is started once in a process: here, by a program that imported mpi4py before, or by a tool in C that called
`MPI_Init` itself. It is ended here only in the first case.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from typing import Any

import torch

from paceline.core.lazy import needed
from paceline.core.world import host_name
from paceline.errors import UnsupportedError

INSTALL = "load the cluster's MPI (on one machine: pip install mpich)"

_ours: list[Any] = []  # the MPI that was started here, and is to be ended


def load(timeout_s: float) -> Any:
    """The module `mpi4py.MPI`, with MPI started.

    Args:
        timeout_s: for all processes of the job to start MPI, which waits for them: afterwards this process ends.

    Raises:
        MissingExtraError: mpi4py is not installed.
        UnsupportedError: MPI is missing, MPI has ended, or this thread may not call it.
    """
    with needed('transport="mpi"', "mpi"):
        import mpi4py
    try:
        starts = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
        if starts:
            if _started_by_a_tool():
                mpi4py.rc.errors = "default"  # the tool keeps its own error handler
            mpi4py.rc.initialize = False  # mpi4py would without a deadline
            mpi4py.rc.finalize = False  # and in forked children as well
        from mpi4py import MPI

        if starts and not MPI.Is_initialized():
            _start(MPI, timeout_s)
    except (ImportError, RuntimeError) as error:  # mpi4py found no library
        first = str(error).strip().splitlines()[0]
        raise UnsupportedError(f'transport="mpi": mpi4py cannot use MPI ({first}): {INSTALL}') from error
    if MPI.Is_finalized():
        raise UnsupportedError('transport="mpi": MPI has ended in this process (MPI_Finalize), and cannot start again')
    if not MPI.Is_initialized():  # mpi4py was told to leave that to the program
        raise UnsupportedError('transport="mpi": mpi4py.rc.initialize is off; call MPI.Init_thread() before attach')
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise UnsupportedError(
            f'transport="mpi": MPI was started with {level_name(MPI)}, so only the thread that started it may call '
            "attach; start it with MPI_Init_thread(..., MPI_THREAD_MULTIPLE)"
        )
    return MPI


def level_name(mpi: Any) -> str:
    """The thread level that MPI was started with, as MPI spells it."""
    names = {
        mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    }
    return names.get(mpi.Query_thread(), "MPI_THREAD_MULTIPLE")


def version(mpi: Any) -> str:
    """The first line of what the library says of itself, such as "MPICH Version: 5.0.2"."""
    return " ".join(str(mpi.Get_library_version()).split("\n", 1)[0].replace("\0", "").split())[:100]


def takes_device_memory(mpi: Any) -> bool:
    """Whether this MPI says that it takes tensors in CUDA memory."""
    if not torch.cuda.is_available():
        return False
    with contextlib.suppress(OSError, AttributeError):  # a library without the question says no
        return int(ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support()) == 1
    return False


def abort_at_exit(mpi: Any) -> None:
    """Let the process end by MPI_Abort, which ends all workers, instead of MPI_Finalize, which would wait for them."""
    _ours.clear()
    with contextlib.suppress(AttributeError):
        mpi._set_abort_status(1)  # as mpi4py.run does after an error


def _start(mpi: Any, timeout_s: float) -> None:
    """Start MPI by a call that lets other threads run, so that one of them can end it."""
    late = threading.Timer(timeout_s, _give_up, (timeout_s,))
    late.daemon = True
    late.start()
    provided = ctypes.c_int(0)
    try:
        code = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
    finally:
        late.cancel()
    if code != 0:
        raise UnsupportedError(f'transport="mpi": MPI_Init_thread failed with code {code}: {INSTALL}')
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
    _ours.append(mpi)
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    """End MPI at the end of the program; it waits for the other processes of the job, which come to theirs."""
    if _ours and os.getpid() == process and not _ours[0].Is_finalized():
        _ours[0].Finalize()


def _give_up(timeout_s: float) -> None:
    """End the process: nothing else ends a call of `MPI_Init`."""
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "?")
    print(
        f"paceline: MPI_Init did not return within {timeout_s:g} s [rank {rank} on {host_name()}]: not all processes "
        "of mpiexec called attach; look at the last lines of the others",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _started_by_a_tool() -> bool:
    """Whether code other than mpi4py has started MPI in this process."""
    started = ctypes.c_int(0)
    try:
        ctypes.CDLL(None).MPI_Initialized(ctypes.byref(started))
    except (OSError, AttributeError):  # the program has no MPI of its own
        return False
    return bool(started.value)
