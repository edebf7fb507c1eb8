# SPDX-License-Identifier: Apache-2.0
"""The command `paceline`, also as `python -m paceline`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command; Ctrl-C during the imports ends it with one line."""
    try:
        from paceline.cli import app
    except KeyboardInterrupt:
        print("stopped before anything was started", file=sys.stderr, flush=True)
        os._exit(130)
    app(prog_name="paceline")


if __name__ == "__main__":
    main()
