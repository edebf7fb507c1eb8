# SPDX-License-Identifier: Apache-2.0
"""`python -m devtools.storm`: see :mod:`.command`."""

from __future__ import annotations

import typer
from devtools.storm.command import command

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("storm")(command)

if __name__ == "__main__":
    app(prog_name="python -m devtools.storm")
