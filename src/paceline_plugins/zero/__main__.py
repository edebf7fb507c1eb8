# SPDX-License-Identifier: Apache-2.0
"""`python -m paceline_plugins.zero train.py`: one worker of an unchanged program."""

from __future__ import annotations

import os
import sys

from paceline_plugins.zero import hashing

if __name__ == "__main__":
    if hashing.needed(os.environ):
        hashing.start_again()
    from paceline_plugins.zero.program import main

    main(sys.argv[1:])
