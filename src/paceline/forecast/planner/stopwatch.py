# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a user's script, which stays as it is: one process, a few steps, and what its optimizer holds.

The script runs in a process of its own (`python -m paceline.forecast.planner.stopwatch`), alone as on a cluster of one.
torch calls a hook behind every optimizer's step, whichever optimizer it is. From one step's end to the next is a step
time, loading of data included; the first few, in which memory is found and kernels are chosen, are left out. Where the
script steps several optimizers in turn, the one that made the first step marks the time, and the numbers of all are
added up. When enough steps are made the script is ended as by `sys.exit()`, so that its `finally` blocks run.

The answer comes as JSON in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.communication.schedulers import alone
from paceline.errors import PacelineError
from paceline.observe.reports.read import has_run, read_runs

WARM_STEPS = 3
LEAST_STEPS = 3


class StopwatchError(PacelineError, RuntimeError):
    """A script could not be timed; the message says what it did instead."""


@dataclass(frozen=True)
class Timed:
    """What was found.

    Attributes:
        times_s: of the steps, in order.
        shapes: of the trainable parameters.
        moments: moments that the optimizer keeps of each parameter.
        batches: minibatches of a pass over the data, where the script shares its loader through paceline; else None.
    """

    times_s: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]
    moments: int
    batches: int | None = None


def time_script(script: Path, arguments: Sequence[str] = (), steps: int = 20, timeout_s: float = 300.0) -> Timed:
    """Run `script` for some steps and measure.

    Args:
        script: a training program; any that steps an optimizer of torch.
        arguments: its own.
        steps: that are measured, behind the first few.
        timeout_s: after which the script is ended.

    Raises:
        StopwatchError: it failed, or made too few steps before its end or the deadline.
    """
    with tempfile.TemporaryDirectory() as directory:
        answer, said, log = (Path(directory) / name for name in ("answer.json", "said", "log"))
        environment = alone(os.environ) | {"PACELINE_LOG": str(log)}
        command = [
            sys.executable,
            "-m",
            "paceline.forecast.planner.stopwatch",
            str(answer),
            str(steps),
            str(script),
            *arguments,
        ]
        how = _finish(command, environment, said, timeout_s)
        if not answer.is_file():
            raise StopwatchError(f"{script} {how}, and no optimizer of torch made {LEAST_STEPS + WARM_STEPS} steps; "
                                 f"the last that it said: {_last_words(said)}")  # fmt: skip
        values = json.loads(answer.read_text(encoding="utf-8"))
        shapes = tuple(tuple(shape) for shape in values["shapes"])
        return Timed(tuple(values["times_s"]), shapes, values["moments"], _batches(log))


def _finish(command: list[str], environment: dict[str, str], said: Path, timeout_s: float) -> str:
    """Run to the end or the deadline, and leave nothing behind; how it ended, in words."""
    with said.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            return f"ended with exit code {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            return f"was ended after {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_words(said: Path) -> str:
    lines = [line for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing"


def _batches(log: Path) -> int | None:
    """Minibatches of the first pass over the data, as the run's own log has them."""
    if not has_run(log):
        return None
    found = [epoch.batches for run in read_runs(log) for worker in run.workers for epoch in worker.epochs]
    return next((batches for batches in found if batches), None)


# ---- within the script's process ------------------------------------------------------------------------------------


class _Hook:
    """Called behind every step of every optimizer.

    Args:
        steps: to measure.
    """

    def __init__(self, steps: int) -> None:
        self._marks: list[float] = []
        self._most = steps + WARM_STEPS + 1
        self._optimizers: dict[int, Any] = {}

    def __call__(self, optimizer: Any, *rest: object) -> None:
        import torch

        self._optimizers.setdefault(id(optimizer), optimizer)
        if id(optimizer) != next(iter(self._optimizers)):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was queued belongs to the step
        self._marks.append(time.perf_counter())
        if len(self._marks) == self._most:
            raise SystemExit(0)

    def found(self) -> Timed | None:
        """What was measured; None where it is too little."""
        import torch

        times = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)][WARM_STEPS:]
        if len(times) < LEAST_STEPS:
            return None
        parameters = [p for o in self._optimizers.values() for group in o.param_groups for p in group["params"]]
        shapes, moments = [], 0
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                like = [v for v in state.values() if torch.is_tensor(v) and v.dim() > 0]
                moments = max(moments, len(like))
        seen: set[int] = set()
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                shapes.append(tuple(parameter.shape))
        return Timed(tuple(times), tuple(shapes), moments)


def main() -> None:
    """python -m paceline.forecast.planner.stopwatch ANSWER STEPS SCRIPT ARGUMENTS..."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    answer, steps, script, *arguments = sys.argv[1:]
    hook = _Hook(int(steps))
    register_optimizer_step_post_hook(hook)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does for a script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        found = hook.found()
        if found is not None:
            Path(answer).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
