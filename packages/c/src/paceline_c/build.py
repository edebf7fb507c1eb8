# SPDX-License-Identifier: Apache-2.0
"""Compiles libpaceline with the C compiler of this host, and puts it below a prefix as `make install` would.

::

    PREFIX/include/paceline.h, paceline.hpp
    PREFIX/lib/libpaceline.so
    PREFIX/lib/pkgconfig/paceline.pc

The prefix is that of this Python, mostly a virtual environment. The library starts this Python, unless
`PACELINE_PYTHON` names another when the tool runs.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline_c.where import shared_library

HERE = Path(__file__).parent
HEADERS = ("paceline.h", "paceline.hpp")
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,-soname,libpaceline.so",
    "-Wl,-z,nodelete",
)
"""`nodelete`: the library runs at the process's exit."""
COMPILE_S = 120


class BuildError(Exception):
    """The library cannot be built here; the message says why and what to do."""


@dataclass(frozen=True)
class Place:
    """Where the library is, or goes."""

    prefix: Path

    @property
    def include(self) -> Path:
        """The folder of the headers."""
        return self.prefix / "include"

    @property
    def lib(self) -> Path:
        """The folder of the library."""
        return self.prefix / "lib"

    @property
    def library(self) -> Path:
        """The library."""
        return self.lib / "libpaceline.so"

    @property
    def package(self) -> Path:
        """The file that pkg-config reads."""
        return self.lib / "pkgconfig" / "paceline.pc"

    def cflags(self) -> list[str]:
        """What a tool's compiler needs."""
        return [f"-I{self.include}"]

    def libs(self) -> list[str]:
        """What its linker needs; the tool then finds the library without LD_LIBRARY_PATH."""
        return [f"-L{self.lib}", "-lpaceline", f"-Wl,-rpath,{self.lib}"]

    def fresh(self) -> bool:
        """Whether the library is there, built from these sources for this Python."""
        try:
            return self.library.is_file() and _mark() in self.package.read_text(encoding="utf-8")
        except OSError:
            return False


def build(place: Place, flags: tuple[str, ...] = ()) -> None:
    """Compile and install.

    Args:
        place: where to.
        flags: further flags of the compiler.

    Raises:
        BuildError: there is no compiler, this Python has no shared library, or the prefix cannot be written.
    """
    if not shared_library():
        raise BuildError(
            f"{sys.executable} has no shared library (libpython), which a tool needs to start Python; install it "
            "(apt install libpython3-dev), or use a Python that has it: conda's, uv's, one built with --enable-shared"
        )
    try:
        for folder in (place.include, place.package.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.lib) as scratch:
            made = Path(scratch) / "libpaceline.so"
            _compile(made, flags)
            os.replace(made, place.library)
        for name in HEADERS:
            shutil.copyfile(HERE / name, place.include / name)
        place.package.write_text(_package(place), encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{place.prefix} cannot be written ({error}); choose another: --prefix DIR") from error


def compiler() -> list[str]:
    """The C compiler: $CC, or cc."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C compiler {command[0]!r}; install one (apt install gcc), or name one in CC")
    return command


def _compile(made: Path, flags: tuple[str, ...]) -> None:
    quoted = sys.executable.replace("\\", "\\\\").replace('"', '\\"')
    python = f'-DPL_BUILT_FOR="{quoted}"'
    command = [*compiler(), *FLAGS, *flags, python, f"-I{HERE}", str(HERE / "paceline.c"), "-o", str(made), "-ldl"]
    done = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def _mark() -> str:
    """A line of the file of pkg-config that changes with the sources and with Python."""
    digest = hashlib.sha256(os.fsencode(sys.executable))
    for name in ("paceline.c", "python_functions.h", *HEADERS):
        digest.update((HERE / name).read_bytes())
    return f"# sources {digest.hexdigest()}"


def _package(place: Place) -> str:
    text = (HERE / "paceline.pc.in").read_text(encoding="utf-8")
    try:
        number = version("paceline-c")
    except PackageNotFoundError:
        number = "0"
    return text.replace("@mark@", _mark()).replace("@prefix@", str(place.prefix)).replace("@version@", number)
