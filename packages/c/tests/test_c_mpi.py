# SPDX-License-Identifier: Apache-2.0
"""A tool in C that has called `MPI_Init` before it attaches: one MPI, messages apart, ended by the tool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from c_helpers import compiled, run

HERE = Path(sys.executable).parent
LIBRARIES = Path(sys.prefix) / "lib"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not (HERE / "mpiexec").exists(), reason="there is no MPI"
)


@pytest.mark.slow  # tests/processes/test_mpi.py has a program with an MPI of its own
@pytest.mark.parametrize("threads", ["many", "one"])
def test_a_tool_that_uses_mpi_itself(prefix: Path, tmp_path: Path, threads: str) -> None:
    flags = [f"-I{Path(sys.prefix) / 'include'}", f"-L{LIBRARIES}", "-lmpi", f"-Wl,-rpath,{LIBRARIES}"]
    tool = compiled(prefix, "mpi.c", tmp_path, *flags)
    said = run([HERE / "mpiexec", "-n", "2", tool, threads])
    lines = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert len(lines) == 2, said
    for rank, line in enumerate(lines):
        words = line.split()
        assert [float.fromhex(words[k]) for k in (2, 3, 5)] == [18.0, 22.0, 36.0], "rank 0's numbers, and 1.5 a step"
        assert words[6:] == ["message", str(1 - rank), "fatal", "1", "finalized", "0"]
