# SPDX-License-Identifier: Apache-2.0
"""`paceline` with the places at which the control plane of an elastic run may be killed.

python launcher.py JOB.json run --elastic 1:4 ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from devtools.counting.job import read
from devtools.counting.points import Points, in_launcher

from paceline.cli import app

if __name__ == "__main__":
    job = read(sys.argv[1])
    (Path(job.directory) / "control.pid").write_text(str(os.getpid()))
    in_launcher(Points(job))
    app(sys.argv[2:])
