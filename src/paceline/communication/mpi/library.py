# SPDX-License-Identifier: Apache-2.0
"""mpi4py and the MPI under it.

MPI is started once in a process: here, by a program that imported mpi4py before, or by a tool in C that called
`MPI_Init` itself. It is ended here only in the first case.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

import torch

from paceline.errors import UnsupportedError

INSTALL = "pip install 'paceline[mpi]', and load the cluster's MPI (or, on one machine, pip install mpich)"

_ours: list[bool] = []  # whether MPI was started here; empty if the program imported mpi4py before


def load() -> Any:
    """The module `mpi4py.MPI`, with MPI started.

    Raises:
        UnsupportedError: mpi4py or MPI is missing, MPI has ended, or this thread may not call it.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            _ours.append(not _started_by_a_tool())
            if not _ours[0]:
                mpi4py.rc.errors = "default"  # the tool keeps its own error handler
            mpi4py.rc.finalize = False  # mpi4py would, in forked children as well
        from mpi4py import MPI
    except ImportError as error:
        raise UnsupportedError(f'transport="mpi" needs mpi4py ({error}): {INSTALL}') from error
    except RuntimeError as error:  # mpi4py found no library, or it does not start
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


def end(mpi: Any) -> None:
    """End MPI if it was started here; it waits for the other processes of the job, which come to their ends, too."""
    if _ours == [True] and not mpi.Is_finalized():
        mpi.Finalize()


def abort_at_exit(mpi: Any) -> None:
    """Let the process end by MPI_Abort, which ends all workers, instead of MPI_Finalize, which would wait for them."""
    with contextlib.suppress(AttributeError):
        mpi._set_abort_status(1)  # as mpi4py.run does after an error


def _started_by_a_tool() -> bool:
    """Whether code other than mpi4py has started MPI in this process."""
    started = ctypes.c_int(0)
    try:
        ctypes.CDLL(None).MPI_Initialized(ctypes.byref(started))
    except (OSError, AttributeError):  # the program has no MPI of its own
        return False
    return bool(started.value)
