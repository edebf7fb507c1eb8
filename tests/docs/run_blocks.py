# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of a page, each in a directory and a namespace of its own: `python -m tests.docs.run_blocks FILES`.

Nothing of one block is there in the next but what Python itself keeps. The process ends without taking torch apart,
which takes longer than most blocks.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    code = 0
    for name in sys.argv[1:]:
        place = Path(name).with_suffix("")
        place.mkdir()
        os.chdir(place)
        try:
            sys.argv = [name]
            runpy.run_path(name, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            code = 1
    atexit._run_exitfuncs()  # closes the runs that are open
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
