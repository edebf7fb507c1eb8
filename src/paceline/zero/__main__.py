# SPDX-License-Identifier: Apache-2.0
"""`python -m paceline.zero train.py`: one worker of a program as it is."""

from __future__ import annotations

import sys

from paceline.zero.program import main

if __name__ == "__main__":
    main(sys.argv[1:])
