# SPDX-License-Identifier: Apache-2.0
"""What one run of the counting model is, and the kills that are planned in it, as JSON that its processes read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Kill:
    """A planned death.

    Attributes:
        point: where in the program; see :mod:`devtools.counting.points`.
        exchange: the least exchange, where the point is one of the training.
        whom: "self", "all" (every worker, the one at the point last) or "control" (the launcher that hosts it).
    """

    point: str
    exchange: int = 0
    whom: str = "self"


@dataclass
class Job:
    """A run.

    Attributes:
        directory: of everything that the run leaves: pids, marks of the kills, finals.
        rule: of the run; momentum 0 and rate 1 leave whole numbers.
        workers: of the run; with fewer alive the others hold before their next step.
        samples, batch, epochs: of the training.
        exchanges: columns of the model.
        checkpoint: directory of steps, empty for none.
        every_blocks, keep: of the steps.
        timeout_s: of the run.
        kills: in their order; the next one is armed when the one before has happened.
    """

    directory: str
    rule: str = "bmuf(period=3, momentum=0.0, lr=1.0)"
    workers: int = 3
    samples: int = 384
    batch: int = 8
    epochs: int = 3
    exchanges: int = 160
    checkpoint: str = ""
    every_blocks: int = 2
    keep: int = 3
    timeout_s: float = 20.0
    kills: list[Kill] = field(default_factory=list)

    @property
    def pids(self) -> Path:
        """Directory with an empty file for the pid of each worker."""
        return Path(self.directory) / "pids"

    @property
    def marks(self) -> Path:
        """Directory with a file for each kill that has happened."""
        return Path(self.directory) / "marks"

    @property
    def finals(self) -> Path:
        """Directory of the weights with which workers ended."""
        return Path(self.directory) / "finals"

    def write(self) -> Path:
        """Leave it where the processes read it."""
        for path in (self.pids, self.marks, self.finals):
            path.mkdir(parents=True, exist_ok=True)
        path = Path(self.directory) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path


def read(path: str | Path) -> Job:
    """The job that stands in a file."""
    said = json.loads(Path(path).read_text())
    return Job(**{**said, "kills": [Kill(**one) for one in said["kills"]]})
