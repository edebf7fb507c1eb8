# SPDX-License-Identifier: Apache-2.0
"""One text, four ways to train on it: alone, with BMUF, with averaging, and synchronously.

Every way sees the same number of minibatches in all, at the same learning rate, which is the best
of a few for the worker alone. At the end: a table, a report page, and a few lines that the model
trained with BMUF writes by itself::

    python demo.py

Or one worker alone, and then any rules that you name::

    python demo.py --rule asgd --rule "ssp(staleness=3)" --rule dc_asgd
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from model import CharLM, generate
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline import RuleError, rule_from_text
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline_plugins.report import ExtraTable, write_report

HERE = Path(__file__).resolve().parent
LOOK_EVERY_S = 0.25
LINE_EVERY_S = 5.0  # where there is no terminal to draw on
GRACE_S = 15.0  # that a launcher has to end its workers
PROMPT = "def "
LONGEST_NAME = 40  # of a way: it stands in a table and names a directory
COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: as the table and the log's directory call it.
        rule: for `paceline run`; None for one worker, which is started without paceline's launcher.
    """

    name: str
    rule: str | None


Result = dict[str, Any]  # what train.py leaves in its result.json


class TrainingFailed(RuntimeError):
    """A training ended badly or not at all; the message says where to look."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare several ways to train one model.")
    parser.add_argument(
        "--rule",
        action="append",
        type=_rule_text,
        help='such as "bmuf(period=8)", once for each way beside one worker; default: BMUF, averaging, synchronous',
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=10_000, help="of all workers together")
    parser.add_argument("--period", type=int, default=8, help="minibatches of a block")
    parser.add_argument("--lr", type=float, default=8.0, help="learning rate, for all ways")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for one training")
    return parser.parse_args()


def _rule_text(text: str) -> str:
    """A rule that exists; paceline's own words on one that does not, before anything runs."""
    try:
        rule_from_text(text)
    except RuleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def chosen_ways(args: argparse.Namespace) -> list[Way]:
    return named_ways(args.rule) if args.rule else four_ways(args.period)


def named_ways(rules: Sequence[str]) -> list[Way]:
    """One worker alone, and a way for each rule; no two of the same name."""
    ways = [Way("one worker", None)]
    for rule in rules:
        name = wanted = re.sub(r"[^\w.]+", "-", rule).strip("-").lower()[:LONGEST_NAME]
        taken, number = {way.name for way in ways}, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        ways.append(Way(name, rule))
    return ways


def four_ways(period: int) -> list[Way]:
    return [
        Way("one worker", None),
        Way("BMUF", f"bmuf(period={period})"),
        Way("averaging", f"averaging(period={period})"),
        Way("synchronous", "sync"),
    ]


def main() -> int:
    args, console = parse_arguments(), Console()
    signal.signal(signal.SIGTERM, _as_interrupt)
    ways = chosen_ways(args)
    console.print(
        f"{len(ways)} trainings of {args.minibatches:,} minibatches each: one worker alone, then "
        f"{args.workers} workers on the {cores()} cores of this machine"
    )
    try:
        results = [train(way, args, Display(console, way, args)) for way in ways]
    except TrainingFailed as error:
        console.print("the demo stopped:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no training is left running")
        return 130
    conclude(console, ways, results, args)
    return 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- one training ---------------------------------------------------------------------------------


def folder(way: Way, args: argparse.Namespace) -> Path:
    return args.out / way.name.replace(" ", "-").lower()


def command(way: Way, args: argparse.Namespace) -> list[str]:
    """The command line of one training."""
    own = folder(way, args)
    script = [str(HERE / "train.py"), f"--minibatches={args.minibatches}", f"--lr={args.lr}"]
    script += [f"--seed={args.seed}", f"--result={own / 'result.json'}"]
    script += [f"--export={own / 'model.pt'}"]
    if way.rule is None:
        return [sys.executable, *script, f"--log={own}"]
    launcher = [sys.executable, "-m", "paceline", "run", "--quiet", f"--workers={args.workers}"]
    launcher += [f"--rule={way.rule}", f"--log={own}", "--overwrite", "--timeout=120"]
    return [*launcher, *script]


def train(way: Way, args: argparse.Namespace, show: Display) -> Result:
    """Run one training to its end and read its result."""
    own = folder(way, args)
    shutil.rmtree(own, ignore_errors=True)  # what an earlier demo left there
    own.mkdir(parents=True)
    live, started = Live(own), time.monotonic()
    output = own / "output.txt"
    with show, process(command(way, args), output) as running:
        while running.poll() is None:
            if time.monotonic() - started > args.deadline:
                raise TrainingFailed(
                    f"{way.name} was not done after {args.deadline:g} s (see {output}); "
                    "give it longer with --deadline, or less to do with --minibatches"
                )
            show.update(live.poll())
            time.sleep(LOOK_EVERY_S)
        show.update(live.poll())
    if running.returncode != 0:
        raise TrainingFailed(
            f"{way.name} ended with exit code {running.returncode}; its last words, from {output}:\n"
            + last_lines(output)
        )
    return json.loads((own / "result.json").read_text(encoding="utf-8"))


@contextmanager
def process(arguments: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block, nor do its children."""
    with output.open("wb") as file:
        # A session of its own: Ctrl-C comes to this program alone, which then ends the training.
        running = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield running
        finally:
            end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """Ask a process to stop, and after a while make it."""
    if running.poll() is not None:
        return
    os.killpg(running.pid, signal.SIGTERM)
    try:
        running.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


class Display:
    """A progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, way: Way, args: argparse.Namespace) -> None:
        self.console, self.total = console, args.minibatches
        self.title = way.name if way.rule is None else f"{way.name}, {args.workers} workers"
        self.started = self.said = time.monotonic()
        self.latest = LiveSnapshot()
        self.bar = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.completed:>6,.0f} minibatches"),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(self.title, total=self.total, loss="starting")

    def __enter__(self) -> Display:
        self.started = self.said = time.monotonic()
        self.bar.reset(self.task, loss="starting")
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        if not self.console.is_terminal:
            self._say()

    def update(self, now: LiveSnapshot) -> None:
        """Show how far the training is."""
        self.latest = now
        self.bar.update(self.task, completed=now.total, loss=self._loss())
        if not self.console.is_terminal and time.monotonic() - self.said >= LINE_EVERY_S:
            self._say()

    def _loss(self) -> str:
        return "starting" if self.latest.loss is None else f"loss {self.latest.loss:.3f}"

    def _say(self) -> None:
        self.said = time.monotonic()
        done = f"{self.latest.total:,} of {self.total:,} minibatches"
        self.console.print(f"{self.title}: {done}, {self._loss()}, {self.said - self.started:.0f} s")


# -- what came out --------------------------------------------------------------------------------


def conclude(console: Console, ways: list[Way], results: list[Result], args: argparse.Namespace) -> None:
    """The table, the page, and a sample of what was learnt."""
    rows = comparison(ways, results, args)
    limit = min(args.workers, cores())
    note = (
        f"{args.workers} workers on {cores()} cores: no speed-up above {limit} is possible, and "
        f"efficiency is the speed-up divided by {limit}. Times are those of the training loop."
    )
    title = f"Validation loss of {args.workers} workers and of one, {args.minibatches:,} minibatches in all"
    console.print(as_table(rows, title, note))
    console.print(verdict(ways, results), highlight=False)
    page = write_report(
        [folder(way, args) for way in ways],
        args.out / "report",
        title=f"{COUNTS[len(ways)] if len(ways) < len(COUNTS) else len(ways)} ways to train a character model",
        extra=ExtraTable(title, rows, note),
    )
    console.print(f"\nThe {ways[1].name} model writes, after {PROMPT!r}:\n", highlight=False)
    console.print(sample(folder(ways[1], args) / "model.pt", args.seed), markup=False)
    console.print(f"\nreport page: {page}", soft_wrap=True)


def comparison(ways: list[Way], results: list[Result], args: argparse.Namespace) -> list[dict[str, str]]:
    """A row for each way."""
    alone = results[0]
    return [_row(way, result, alone) for way, result in zip(ways, results, strict=True)]


def _row(way: Way, result: Result, alone: Result) -> dict[str, str]:
    speed_up = alone["training_s"] / result["training_s"]
    relative = result["validation_loss"] / alone["validation_loss"] - 1
    return {
        "training": way.name,
        "loss": f"{result['validation_loss']:.4f}",
        "to one worker": "" if way.rule is None else f"{100 * relative:+.1f} %",
        "steps each": f"{result['minibatches_per_worker']:,}",
        "sent each": f"{result['bytes_sent_per_worker'] / 1e6:,.0f} MB",
        "time": f"{result['training_s']:.1f} s",
        "speed-up": f"{speed_up:.2f}",
        "efficiency": f"{100 * speed_up / min(result['workers'], cores()):.0f} %",
    }


def as_table(rows: list[dict[str, str]], title: str, note: str) -> Table:
    """The rows for a terminal; headings stand on several lines, so that 80 columns are enough."""
    table = Table(title=title, caption=note, caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        heading = name.replace(" ", "\n").replace("-", "-\n")
        table.add_column(heading, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def verdict(ways: list[Way], results: list[Result]) -> str:
    """One sentence on what the table shows, whatever it shows."""
    losses = {way.name: result["validation_loss"] for way, result in zip(ways, results, strict=True)}
    alone = losses["one worker"]
    if "BMUF" not in losses:
        ends = [f"{way.name} {100 * (losses[way.name] / alone - 1):+.1f} %" for way in ways[1:]]
        return f"From the worker alone end: {', '.join(ends)}."
    bmuf = losses["BMUF"]
    others = [name for name in ("averaging", "synchronous") if losses[name] > bmuf]
    ahead = f"ahead of {' and '.join(others)}" if others else "ahead of neither of the others"
    return f"BMUF ends {100 * (bmuf / alone - 1):+.1f} % from the worker alone, {ahead}."


def sample(weights: Path, seed: int) -> str:
    model = CharLM()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return generate(model, PROMPT, 300, seed)


if __name__ == "__main__":
    sys.exit(main())
