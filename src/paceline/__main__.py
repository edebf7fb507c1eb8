# SPDX-License-Identifier: Apache-2.0
"""`python -m paceline` is the command `paceline`."""

from __future__ import annotations

from .cli import app

if __name__ == "__main__":
    app(prog_name="paceline")
