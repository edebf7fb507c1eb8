# SPDX-License-Identifier: Apache-2.0
"""Times some steps of a user's unchanged script, and records its parameters and optimizer state.

The script runs in a process of its own (`python -m paceline_plugins.forecast.planner.stopwatch`), as the only worker.
torch calls a hook after every step of every optimizer. A step time is from one step's end to the next, loading of data
included; the first few steps, which allocate memory and choose kernels, do not count. With several optimizers, the one
that makes the first step marks the time, and the parameters of all count. After enough steps the script ends as by
`sys.exit()`, so that its `finally` blocks run. The result is a JSON file.
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
    """A script could not be timed; the message says how it ended."""


@dataclass(frozen=True)
class Timed:
    """The result."""

    times_s: tuple[float, ...]  # of the steps, in order
    shapes: tuple[tuple[int, ...], ...]  # of the trainable parameters
    moments: int  # moments that the optimizer keeps of each parameter
    # minibatches of a pass over the data, where the script shares its loader through paceline; else None
    batches: int | None = None


def time_script(script: Path, arguments: Sequence[str] = (), steps: int = 20, timeout_s: float = 300.0) -> Timed:
    """Run `script` for some steps and measure.

    Args:
        script: a training program; any that steps an optimizer of torch.
        arguments: of the script.
        steps: to measure, after the first few.
        timeout_s: after which the script is killed.

    Raises:
        StopwatchError: it failed, or made too few steps before its end or the deadline.
    """
    with tempfile.TemporaryDirectory() as directory:
        answer, output, log = (Path(directory) / name for name in ("answer.json", "output", "log"))
        environment = alone(os.environ) | {"PACELINE_LOG": str(log)}
        module = "paceline_plugins.forecast.planner.stopwatch"
        command = [sys.executable, "-m", module, str(answer), str(steps), str(script), *arguments]
        how = _finish(command, environment, output, timeout_s)
        if not answer.is_file():
            raise StopwatchError(f"{script} {how}, and no optimizer of torch made {LEAST_STEPS + WARM_STEPS} steps; "
                                 f"its last output: {_last_line(output)}")  # fmt: skip
        values = json.loads(answer.read_text(encoding="utf-8"))
        shapes = tuple(tuple(shape) for shape in values["shapes"])
        return Timed(tuple(values["times_s"]), shapes, values["moments"], _batches(log))


def _finish(command: list[str], environment: dict[str, str], output: Path, timeout_s: float) -> str:
    """Run to the end or the deadline, kill all processes; how it ended, in words."""
    with output.open("wb") as sink:
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


def _last_line(output: Path) -> str:
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing"


def _batches(log: Path) -> int | None:
    """Minibatches of the first pass over the data, from the run's log."""
    if not has_run(log):
        return None
    found = [epoch.batches for run in read_runs(log) for worker in run.workers for epoch in worker.epochs]
    return next((batches for batches in found if batches), None)


class _Hook:
    """Called after every step of every optimizer, in the script's process.

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
            torch.cuda.synchronize()  # queued kernels belong to the step
        self._marks.append(time.perf_counter())
        if len(self._marks) == self._most:
            raise SystemExit(0)

    def found(self) -> Timed | None:
        """The result; None after too few steps."""
        import torch

        times = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)][WARM_STEPS:]
        if len(times) < LEAST_STEPS:
            return None
        optimizers = self._optimizers.values()
        parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        shapes = tuple(tuple(p.shape) for p in parameters.values() if p.requires_grad)
        states = [state.values() for o in optimizers for state in o.state.values()]
        moments = [sum(torch.is_tensor(value) and value.dim() > 0 for value in state) for state in states]
        return Timed(tuple(times), shapes, max(moments, default=0))


def main() -> None:
    """python -m paceline_plugins.forecast.planner.stopwatch ANSWER STEPS SCRIPT ARGUMENTS..."""
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
