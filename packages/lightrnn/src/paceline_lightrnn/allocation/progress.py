# SPDX-License-Identifier: Apache-2.0
"""Finished phases of a re-allocation on disk, so that an interrupted one continues."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline import CheckpointError
from paceline_lightrnn import files
from paceline_lightrnn.costs import CostSource
from paceline_lightrnn.table import WordTable

FORMAT = "paceline re-allocation 1"
FILE = "reallocation.safetensors"
PROBES = 64
"""Words whose costs are part of the fingerprint."""


@dataclass
class Finished:
    """Results of the finished phases: arrays by name, and their seconds."""

    phases: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


class Journal:
    """The file in the folder `resume`; without a folder nothing is saved.

    Raises:
        CheckpointError: the file is damaged, or of other costs, another table or another seed.
    """

    def __init__(self, folder: Path | None, costs: CostSource, table: WordTable, seed: int) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        self.finished = Finished()
        if self.path is None:
            return
        self._probe = _probe(costs, table)
        shape = {"words": table.words, "rows": table.rows, "columns": table.columns}
        self._about = {"format": FORMAT, **shape, "seed": seed}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self.finished = self._load(self.path)

    def write(self, phase: str, seconds: float, **arrays: np.ndarray) -> None:
        """Add a finished phase; the file is written atomically."""
        self.finished.phases.append(phase)
        self.finished.arrays.update(arrays)
        self.finished.seconds = seconds
        if self.path is None:
            return
        tensors = {**self._probe, **self.finished.arrays}
        about = {**self._about, "phases": self.finished.phases, "seconds": seconds, "checksum": _checksum(tensors)}
        found = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
        with files.whole(self.path) as new:
            save_file(found, new, {"about": json.dumps(about)})

    def remove(self) -> None:
        """The re-allocation has ended."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, path: Path) -> Finished:
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            phases, seconds = about.pop("phases", None), about.pop("seconds", None)
            checksum = about.pop("checksum", None)
        except (OSError, SafetensorError, ValueError, AttributeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; remove it to begin the re-allocation anew") from error
        if about.get("format") != FORMAT or not isinstance(phases, list):
            raise CheckpointError(f"{path} is no re-allocation that was broken off; give another folder to resume")
        if checksum != _checksum(arrays):
            raise CheckpointError(
                f"{path} is damaged: its checksum is wrong; remove it to begin the re-allocation anew"
            )
        for name, value in self._about.items():
            if about.get(name) != value:
                raise CheckpointError(
                    f"{path} is of another re-allocation: its {name} is {about.get(name)}, here it is {value}; "
                    "remove it to begin anew"
                )
        for name, mine in self._probe.items():
            theirs = arrays.pop(name, None)
            if theirs is None or theirs.shape != mine.shape or not _alike(mine, theirs):
                what = "table" if name == "probe_table" else "costs"
                raise CheckpointError(f"{path} is of a re-allocation with another {what}; remove it to begin anew")
        return Finished(phases, arrays, float(seconds))


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), found))
    return found


def _alike(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether they are equal up to rounding: another number of threads adds in another order."""
    if mine.dtype.kind != "f":
        return bool(np.array_equal(mine, theirs))
    return bool(np.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(np.abs(mine).max())))


def _probe(costs: CostSource, table: WordTable) -> dict[str, np.ndarray]:
    words = np.unique(np.linspace(0, table.words - 1, min(PROBES, table.words)).astype(np.int64))
    cells = table.cells.cpu().numpy()
    # Each cell has its weight, so that any change of the table changes the sums.
    weight = np.arange(1, len(cells) + 1, dtype=np.uint64)
    total = np.array([(cells.astype(np.uint64) * weight).sum(), (cells.astype(np.uint64) ** 2 * weight).sum()])
    return {
        "probe_rows": costs.row_costs(words).astype(np.float64).sum(1),
        "probe_columns": costs.column_costs(words).astype(np.float64).sum(1),
        "probe_table": total.astype(np.int64),
    }
