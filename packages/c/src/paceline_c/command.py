# SPDX-License-Identifier: Apache-2.0
"""`paceline config`: what a compiler needs to know of libpaceline, which is built on the first call."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import err, out, refuse
from paceline_c.build import BuildError, Place, build

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def config(
    cflags: Annotated[bool, typer.Option("--cflags", help="Print the flags for a tool's compiler.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Print the flags for a tool's linker.")] = False,
    again: Annotated[bool, typer.Option("--build", help="Build the library, even if it is there.")] = False,
    prefix: Annotated[
        Path, typer.Option(metavar="DIR", help="Where include/ and lib/ of the library are, or go.")
    ] = Path(sys.prefix),
) -> None:
    """Print compiler and linker flags for a tool in C or C++; libpaceline is built on the first call."""
    place = Place(prefix.absolute())
    if again or not place.fresh():
        try:
            build(place)
        except BuildError as error:
            refuse(str(error))
        err().print(f"built {place.library}, which starts {sys.executable}", markup=False)
    flags = [*(place.cflags() if cflags else []), *(place.libs() if libs else [])]
    if flags:
        print(shlex.join(flags))
    elif not again:
        for name, path in (("headers", place.include), ("library", place.library), ("pkg-config", place.package)):
            out().print(f"{name:11} {path}", markup=False)
        out().print(f"{'Python':11} {sys.executable}", markup=False)
