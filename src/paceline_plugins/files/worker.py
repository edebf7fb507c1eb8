# SPDX-License-Identifier: Apache-2.0
"""`python -m paceline_plugins.files.worker PLAN`: a worker of `paceline blocks`."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.doors.adapters.arrays import WritableRun
from paceline.errors import PacelineError
from paceline.run.attach import prepare
from paceline_plugins.files import formats
from paceline_plugins.files.plan import Plan, checked_rule
from paceline_plugins.files.training import Training, untrained


def main(arguments: list[str]) -> int:
    """Train as the plan in the file says; the exit code. What is wrong is the last line on stderr."""
    try:
        train(Plan.read(Path(arguments[0])))
    except PacelineError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(f"{error}; is the disk full, or the place not writable?", file=sys.stderr, flush=True)
        return 1
    return 0


def train(plan: Plan) -> None:
    """Train as the plan says."""
    path = Path(plan.model)
    data = path.read_bytes()
    form = formats.recognise(path, data) if plan.format is None else formats.named(plan.format, plan.layout)
    keep = untrained(dict(form.read(data).tensors))
    model = form.read(data, keep)
    rule = checked_rule(plan.rule)
    how = prepare(rule, seed=plan.seed, timeout_s=plan.timeout_s, data="own")
    run = WritableRun(dict(model.tensors), None, None, None, *how)
    with run:
        Training(plan, run, form, model, keep).train()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
