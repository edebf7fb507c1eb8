# SPDX-License-Identifier: Apache-2.0
"""Methods with blocks on a small language model: against one worker, by number of workers, gain and period.

A perceptron guesses the next character of Python's own library from the last twelve. N workers are simulated stacked
(`paceline_plugins.forecast.simulate_stacked`). All trainings see the same number of minibatches in all, in the same
order, and a learning rate that follows the samples seen in the same way; the loss is the mean cross-entropy on held-out
files, in nats, once at the end.

    python benchmarks/quality/blocks.py table  [--workers 1 4 16 64]   every method at every N
    python benchmarks/quality/blocks.py gain   [--workers 4 16 64]     ours at gains of N^p: the best p, and how surely
    python benchmarks/quality/blocks.py period [--workers 8]           ours and DiLoCo's constants, periods 1 .. 512
    python benchmarks/quality/blocks.py rate   [--workers 1 16]        one worker, and ours, at several local rates

Each takes `--minibatches`, `--optimizer sgd|momentum|adam`, `--period`, `--seeds`, `--jobs`, `--out`, `--plot FILE` and
`--quick` (sizes that show that it runs, no more). The methods of the table:

    sync_linear                    gradients every step, rate x N after a gradual warm-up (Goyal 2017)
    sync_best, averaging_best      the best of a few rates at each N, chosen by the first seed
    averaging                      the mean of the local models
    bmuf_paper                     block momentum 1 - 1/N, Nesterov; also classical, and each with eta ramped
    diloco_paper                   outer momentum .9 and rate .7 whatever N is
    bmuf                           ours: the gain follows N, nothing is tuned
    bmuf_compensated               with momentum only: ours with it averaged and compensated, not left with each worker
    bmuf_adam                      with Adam only: ours with moments compensated, beta1 lowered to .5, or kept at .9

On a quiet core a minibatch takes about half a millisecond. `rate` comes first: the heights in `_block_methods.py` are
starting points, `--alone` and `--rate` give others. The exponent of a gain law whose best gains are the least or the
largest tried (`at_edge`) is no more than a bound.

Finished trainings in `--out` are kept, so that it goes on where it was stopped, and those of one study serve another.
The last line is a JSON object: `loss` of method and place (a place is an N, a gain, a period or a rate; null where a
training diverged), its standard deviation `spread` and each seed's, `chosen` (the training that stands for a method
that chooses), `serial`, `room` (minibatches over period x N^2, of which a filter with a gain of N wants at least 1);
and, of the study of gains, the `law`: the best gain at each N, the exponent p of gain = N^p of each seed, its mean and
spread, and c and q of c N^q.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _block_methods
import _block_plots
import _block_report
import _chars
import _trainings
import torch
from _block_methods import Plan, Training
from torch import Tensor, nn

from paceline.errors import NonFiniteError
from paceline_plugins.forecast import StackedResult, simulate_stacked

WORKERS = {"table": [1, 4, 16, 64], "gain": [4, 16, 64], "period": [8], "rate": [1, 16]}
Batch = tuple[Tensor, Tensor]
CURVE = 32
"""Points of a training's curve that are kept."""


def folder_of(args: argparse.Namespace) -> Path:
    """Trainings that may be compared lie in one folder."""
    task = f"{args.optimizer}-{args.minibatches}x{args.batch}-hidden{args.hidden}-embedding{args.embedding}"
    folder: Path = args.out / task
    return folder


def one(args: argparse.Namespace, training: Training, seed: int) -> None:
    """Train once, and leave what came out."""
    torch.set_num_threads(1)  # other trainings have the other cores
    text, device = _chars.text(args.out), torch.device(args.device)
    torch.manual_seed(seed)
    model = _chars.Perceptron(args.hidden, args.embedding).to(device)
    steps = args.minibatches // training.workers
    batches = _chars.batches(text.train.to(device), training.workers, steps, args.batch, seed)
    row: dict[str, Any] = {"name": training.name, "seed": seed, "loss": None, "curve": []}
    wall, processor = time.perf_counter(), time.process_time()
    try:
        found = trained(args.optimizer, training, model, batches, steps)
    except NonFiniteError as error:
        row["diverged"] = str(error)
    else:
        loss = _chars.judged(model, found.parameters, text.validation.to(device))
        row["loss"] = loss if math.isfinite(loss) else None
        row["curve"] = [round(float(part.mean()), 4) for part in found.losses.chunk(CURVE)]
    row |= {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
    _trainings.leave(folder_of(args), (training.name, seed), row)
    told = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
    print(f"{training.name}, seed {seed}: {told} in {row['seconds']:.0f} s", flush=True)


def trained(kind: str, training: Training, model: nn.Module, batches: Iterable[Batch], steps: int) -> StackedResult:
    """The global model: of stacked workers, or of one that takes the minibatches of N synchronous ones as one."""
    optimizer = training.optimizer(kind, model)

    def rate(step: int) -> float:
        return training.factor((step + 0.5) / steps)

    if training.rule != "sync":
        return simulate_stacked(model, _chars.loss_of, optimizer, training.rule, batches, rate=rate)
    losses = []
    for step, (before, character) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = training.rate * rate(step)
        optimizer.zero_grad()
        loss = _chars.loss_of(model, before.flatten(0, 1), character.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    every = torch.stack(losses)
    if not bool(torch.isfinite(every[-1])):
        raise NonFiniteError(f"the loss is {float(every[-1])} at the end; lower the learning rate")
    return StackedResult(dict(model.named_parameters()), every[:, None])


def one_of(args: argparse.Namespace, plan: Plan, name: str, seed: int) -> None:
    """The same by its name."""
    one(args, {candidate.name: candidate for found in plan.values() for candidate in found}[name], seed)


def all_of_them(args: argparse.Namespace, plan: Plan) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Each method's rows, one for each seed: candidates first, by one seed, then the best of them by the others."""
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    _chars.text(args.out)

    here = None if args.jobs else partial(one_of, args, plan)

    def rows(wanted: list[_trainings.Wanted]) -> dict[_trainings.Wanted, dict[str, Any]]:
        once = list(dict.fromkeys(wanted))
        return dict(zip(once, _trainings.rows_of(folder, once, args.jobs, here), strict=True))

    first = rows([(candidate.name, 0) for found in plan.values() for candidate in found])
    chosen = {
        key: min((candidate.name for candidate in found), key=lambda name: loss_or_inf(first[name, 0]))
        for key, found in plan.items()
    }
    others = rows([(name, seed) for name in chosen.values() for seed in range(1, args.seeds)])
    both = {**first, **others}
    return {key: [both[name, seed] for seed in range(args.seeds)] for key, name in chosen.items()}


def loss_or_inf(row: dict[str, Any]) -> float:
    """A loss that can be compared."""
    return math.inf if row["loss"] is None else float(row["loss"])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=_block_methods.PLANS)
    parser.add_argument("--workers", type=int, nargs="+", help="N")
    parser.add_argument("--minibatches", type=int, default=65_536, help="of all workers together")
    parser.add_argument("--period", type=int, default=4, help="minibatches of a block")
    parser.add_argument("--warmup", type=float, default=0.0, help="share of the steps before the first block")
    parser.add_argument("--optimizer", choices=_block_methods.LOCAL, default="sgd", help="on the workers")
    parser.add_argument("--alone", type=float, help="its rate on one worker")
    parser.add_argument("--rate", type=float, help="its rate under methods with blocks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time; 0 makes all in this process")
    parser.add_argument("--out", type=Path, default=Path("out/blocks"))
    parser.add_argument("--plot", type=Path, help="draw the result into this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    study = parser.add_argument_group("what a study goes over")
    study.add_argument("--methods", nargs="+", help="of the table; all if left out")
    study.add_argument(
        "--recipe", default="bmuf", choices=("bmuf", "bmuf_adam", "diloco"), help="ours, but in the table"
    )
    study.add_argument("--exponents", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    study.add_argument("--periods", type=int, nargs="+", default=[1 << k for k in range(10)])
    study.add_argument("--rates", type=float, nargs="+", default=[0.0625, 0.125, 0.25, 0.5, 1.0])
    task = parser.add_argument_group("the model")
    task.add_argument("--batch", type=int, default=64, help="samples of a minibatch")
    task.add_argument("--hidden", type=int, default=128)
    task.add_argument("--embedding", type=int, default=16)
    task.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    return checked(parser, parser.parse_args())


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with their defaults, or an error that says what is wrong."""
    if args.quick:
        args.minibatches, args.seeds, args.jobs, args.hidden, args.batch = 512, 1, 0, 16, 16
        args.exponents, args.periods, args.rates = [0.5, 0.7, 1.0], [1, 8, 64], [0.25, 0.5]
    if args.workers is None:
        args.workers = [1, 4] if args.quick and args.study == "table" else WORKERS[args.study]
    if args.study == "period" and len(args.workers) != 1:
        parser.error(f"period is a study of one N, got --workers {' '.join(map(str, args.workers))}")
    for workers in args.workers:
        if workers < 1 or args.minibatches % workers:
            parser.error(f"--minibatches must be a multiple of every N, got {args.minibatches} and N = {workers}")
    known = _block_methods.Methods(args, 2).table()
    for method in args.methods or ():
        if method not in known:
            parser.error(f"--methods: there is no {method}; there are {', '.join(known)}")
    return args


def main() -> None:
    """Train what is missing, and report."""
    args = arguments()
    plan = _block_methods.PLANS[args.study](args)
    if args.one:
        one_of(args, plan, args.one[0], int(args.one[1]))
        return
    result = _block_report.summary(args, all_of_them(args, plan))
    if args.plot:
        _block_plots.draw(result, args.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
