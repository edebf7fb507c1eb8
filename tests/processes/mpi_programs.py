# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_mpi.py run: `mpiexec -n N python -m tests.processes.mpi_programs NAME DIRECTORY`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("PMI_RANK", "0"))
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(RANK), os.environ.get("PMI_SIZE", "1")  # as the other programs ask

import torch  # noqa: E402

from paceline.communication import connect  # noqa: E402
from paceline.errors import ClosedError, MismatchError, PeerLostError, UnsupportedError  # noqa: E402
from paceline.update.engine.blocks import outer_state  # noqa: E402
from tests.processes import programs, route_programs  # noqa: E402


def laws(directory: Path) -> None:
    """Operations, channels, parts, threads and dtypes; then every recipe of the table, and a resumed one."""
    transport = connect(60)
    assert transport.name == "mpi"
    transport.open_channels(3)
    said: dict[str, Any] = {
        "all": route_programs.operations(transport),
        "channel": route_programs.operations(transport.channel(2)),
        "parts": route_programs.parts(transport),
        "threads": route_programs.threads(transport),
        "dtypes": dtypes(transport),
        "orders": orders(transport),
        "refused": refused(transport),
        "forked": forked(),
    }
    left = transport.all_reduce(torch.ones(1))
    transport.close()
    said["closed"] = []
    for late in (left.wait, lambda: transport.channel(1).barrier(), lambda: transport.open_channels(99)):
        try:
            late()
        except ClosedError as error:
            said["closed"].append(str(error))
    (directory / f"said.{RANK}").write_text(json.dumps(said))
    programs.table(directory)
    programs.ours(directory)


def dtypes(transport: Any) -> dict[str, list[float]]:
    """Sums of numbers that MPI adds, and of others; of tensors that are not contiguous, and of odd lengths."""
    found = {}
    rank = transport.world.rank
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.uint8):
        x = (torch.arange(7) + rank).to(dtype)
        transport.all_reduce(x).wait()
        found[str(dtype)] = x.double().tolist()
    x = (torch.arange(12.0).view(3, 4) + rank).t()
    transport.all_reduce(x).wait()
    found["transposed"] = x.flatten().tolist()
    x = torch.full((2,), float(rank), dtype=torch.complex64)
    transport.all_reduce(x).wait()
    found["complex"] = x.real.tolist()
    x = torch.ones(0, dtype=torch.bfloat16)
    transport.all_reduce(x).wait()
    out = torch.empty(transport.world.size, 3, dtype=torch.bfloat16)
    transport.all_gather(out, torch.full((3,), float(rank), dtype=torch.bfloat16)).wait()
    found["gathered"] = out.flatten().tolist()
    flags = torch.tensor([rank == 1, True])
    transport.broadcast(flags, 1).wait()
    found["flags"] = flags.double().tolist()
    return found


def orders(transport: Any) -> list[float]:
    """Sums in slices, waited for in another order on each worker."""
    xs = [torch.full((101,), float(k), dtype=torch.bfloat16) for k in range(5)]
    pending = [transport.all_reduce(x) for x in xs]
    for k in torch.randperm(5, generator=torch.Generator().manual_seed(RANK)).tolist():
        pending[k].wait()
    return [float(x[50]) for x in xs]


def refused(transport: Any) -> list[str]:
    """A message of another size, and a part that not all workers name alike."""
    said = []
    if transport.world.rank == 0:
        transport.send(torch.ones(2), 1).wait()
    elif transport.world.rank == 1:
        try:
            transport.receive(torch.ones(3), 0).wait()
        except MismatchError as error:
            said.append(str(error))
    try:
        transport.part([[0, 1], [2, 3]] if RANK else [[0, 2], [1, 3]])
    except MismatchError as error:
        said.append(str(error))
    return said


def hang(directory: Path) -> None:
    """Rank 1 stops in its own program; the others say who."""
    transport = connect(3)
    transport.barrier()
    if RANK == 1:
        time.sleep(100)
    try:
        transport.all_reduce(torch.ones(3)).wait()
    except PeerLostError as error:
        (directory / f"error.{RANK}").write_text(str(error))
    try:
        transport.barrier()
    except PeerLostError as error:
        (directory / f"again.{RANK}").write_text(str(error))
    print("ends", flush=True)


def late(directory: Path) -> None:
    """Rank 1 does not come to attach; MPI itself would wait for it without an end."""
    if RANK == 1:
        time.sleep(100)
    connect(2)


def raises(directory: Path) -> None:
    """Rank 1 ends with an error in its own program."""
    transport = connect(60)
    transport.barrier()
    if RANK == 1:
        raise KeyError("of the user")
    try:
        transport.all_reduce(torch.ones(3)).wait()
    except PeerLostError as error:
        (directory / f"error.{RANK}").write_text(str(error))


def killed(directory: Path) -> None:
    """Rank 1 is killed while the others wait for it."""
    transport = connect(60)
    transport.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.barrier()


def levels(directory: Path) -> None:
    """An MPI that the program started itself, for one thread; its own messages beside ours."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    before = world.irecv(source=1 - RANK, tag=1)
    transport = connect(60)
    said: list[Any] = [transport.background, transport.serves_threads]
    x = torch.tensor([1.0 + RANK])
    transport.all_reduce(x).wait()
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            transport.all_reduce(torch.ones(1)).wait()
        except UnsupportedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    world.send("a message of the program", 1 - RANK, tag=1)
    said += [float(x), errors, before.wait()]
    transport.close()
    transport.close()
    again = connect(60)
    again.all_reduce(x).wait()
    again.close()
    said += [float(x), MPI.Is_finalized()]
    (directory / f"said.{RANK}").write_text(json.dumps(said))
    world.Barrier()
    MPI.Finalize()


def forked() -> int:
    """The exit code of a child that ends as a program ends."""
    faulthandler.cancel_dump_traceback_later()  # a child has not its thread, and would wait for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        raise SystemExit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    outer_state.SMALL_ELEMENTS = outer_state.SMALL_CODED = programs.SMALL
    faulthandler.dump_traceback_later(170, exit=True)
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    faulthandler.cancel_dump_traceback_later()
