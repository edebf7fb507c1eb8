# SPDX-License-Identifier: Apache-2.0
"""`attach`: the one function that every program needs.

It reads the options of `paceline run` from the environment. :mod:`paceline.communication.schedulers` reads this
worker's rank and the number of workers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from paceline.communication.sockets.tls import TLS
from paceline.core.flat import Modules
from paceline.core.lazy import needed
from paceline.core.parse import like
from paceline.errors import OverError, RuleError, UnsupportedError
from paceline.extensions import OBSERVERS, extension
from paceline.observe.event_log import mark_attached
from paceline.observe.sinks.base import Values, as_sink
from paceline.observe.standard_streams import tolerate_full_disk
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline.run.run import Run
from paceline.update.engine import exit_handling
from paceline.update.engine.settings import Settings
from paceline.update.exchange.outliers import Guard, make_guard
from paceline.update.monitor import write_messages

OPTIONS = (
    *("log", "timeout_s", "seed", "outer_state", "scaler", "group", "tls", "transport", "checkpoint"),
    *("every_blocks", "keep", "data", "receipts"),
)
"""Arguments of `attach` that become fields of `Settings`; all others belong to the rule."""
OF_LAUNCHER = {
    "log": "PACELINE_LOG",
    "timeout_s": "PACELINE_TIMEOUT_S",
    "tls": "PACELINE_TLS",
    "checkpoint": "PACELINE_CHECKPOINT",
    "control": "PACELINE_CONTROL",
    "relay": "PACELINE_RELAY",
    "exchanged": "PACELINE_EXCHANGED",
    "start": "PACELINE_RESUME",
    "every_blocks": "PACELINE_CHECKPOINT_EVERY",
}
"""Fields of `Settings` that `paceline run` gives by variables, where the program does not."""
NUMBERS: dict[str, Callable[[str], Any]] = {"timeout_s": float, "every_blocks": int}
ASKED = {"receipts": "PACELINE_RECEIPTS", "search": "PACELINE_ROUND"}
"""Observers, and the variables that ask for them."""
TENSORBOARD, WANDB, METRICS = "PACELINE_TENSORBOARD", "PACELINE_WANDB", "PACELINE_METRICS"
"""Variables of `--tensorboard`, `--wandb` and `--metrics`: a directory; a project; HOST:PORT of the first worker of
each host."""
DEFAULT = "auto"
"""The rule of a program that names none, without `--rule`."""


def attach(
    model: Modules,
    optimizer: Optimizer | list[Optimizer],
    rule: Rule | str | None = None,
    *,
    log: str | Path | None = None,
    checkpoint: str | Path | None = None,
    timeout_s: float | None = None,
    data: str = "shared",
    **settings: Any,
) -> Run:
    """Attach paceline to a model and its optimizer; everything then happens inside `optimizer.step()`.

    All workers start from rank 0's parameters and buffers, trained or frozen. With one worker nothing is
    exchanged and the program runs unchanged.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = paceline.attach(model, optimizer, rule="bmuf", period=16)
    >>> for inputs in run.share(torch.randn(32, 4).split(8)):
    ...     optimizer.zero_grad()
    ...     model(inputs).square().mean().backward()
    ...     optimizer.step()
    >>> run.close()
    >>> run.minibatches
    4

    Args:
        model: the module that is trained, or a list or dictionary of modules.
        optimizer: its optimizer, or a list over disjoint parameters; the last of a list closes a minibatch.
        rule: a name ("bmuf"), text ("bmuf(period=16)") or a `Rule`; None takes the rule of `paceline run`, else "auto"
            (with `period=` "bmuf", or "bmuf_adam" for Adam and AdamW).
        log: directory for the event log; None takes the one of `paceline run`, if any.
        checkpoint: directory, or URL of an object store, in which the newest steps of the run are kept, so that
            `run.resume()` continues from there with the same bits; see `Run.checkpoint`. None takes the place of
            `paceline run`, if any, and else keeps none.
        timeout_s: deadline of every wait for another worker, seconds; None takes that of `paceline run`, else 600.
        data: "shared" warns of a DataLoader that the program trains on without `run.share`; "own" means that each
            worker has its own data (samples drawn at random, files by rank).
        settings: of the rule where it is given by name, such as `period=16`, and these options of the run:

            - `seed=0`: of the order of samples in `run.share`; the same on every worker.
            - `every_blocks=100`: exchanges from one checkpoint step to the next: blocks (of a fragment, if the model
              has several), or minibatches under rules without blocks. `keep=3`: how many steps are kept; the store
              needs room for one more.
            - `guard="auto"`: leave contributions far larger than usual out of the mean, like those with inf or nan:
              "auto" judges blocks, "outliers" gradients as well, a `paceline.Guard` sets the limits, None accepts all.
            - `scaler=None`: the program's GradScaler, if gradients are exchanged.
            - `group=None`: the torch.distributed group whose members are the workers; None for all processes.
            - `outer_state="device"`: where to keep the rule's state; "host" saves device memory.
            - `transport="auto"`: what `paceline run --transport` names, else torch.distributed; "channel" is rings over
              paceline's own sockets, with `tls` for untrusted networks; "mpi" is MPI, for processes that `mpiexec`
              started. Over these two tensors travel through host memory, unless MPI says that it takes CUDA memory.
            - `tls=None`: certificates for the connections of asynchronous rules and of `transport="channel"`: a
              `paceline.TLS`, or the folder of `cert.pem`, `key.pem` and `ca.pem`; None takes the folder of
              `paceline run`, if any, else connections are not encrypted.
            - `receipts=None`: directory in which each worker writes what it brought to and took from every merge, for
              `paceline verify`; None takes that of `paceline run --receipts`, if any.

    Returns:
        The run; use it as a context manager, or call `close()` at the end.

    Raises:
        RuleError: the rule or one of its settings does not exist, or `paceline run --rule` asks for another one.
        UnsupportedError: the rule cannot serve the model or the optimizer.
        CheckpointError: `checkpoint` cannot be read.
        MismatchError: the workers disagree on the rule or the model; raised on every worker.
    """
    given = {"log": log, "checkpoint": checkpoint, "timeout_s": timeout_s, "data": data, **settings}
    every = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]  # the run checks it later
    adam = bool(every) and all(isinstance(one, (Adam, AdamW)) for one in every)
    chosen = prepare(rule, with_period="bmuf_adam" if adam else "bmuf", **given)
    try:
        run = Run(model, optimizer, *chosen)
    except OverError as error:
        exit_handling.exit_after_end(error)
    # a tracker that cannot be opened ends the program before it trains
    try:
        track(run)
    except BaseException:
        run.abandon()
        raise
    return run


def prepare(
    rule: Rule | str | None = None, *, with_period: str = "bmuf", guard: Guard | str | None = "auto", **given: Any
) -> tuple[Rule, Settings]:
    """The rule and the settings from the arguments of `attach` after model and optimizer, and from the environment;
    `with_period` is the rule of a program that gives a period and no rule."""
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    default = with_period if "period" in given else DEFAULT
    try:
        chosen = make_rule(rule if rule is not None else os.environ.get("PACELINE_RULE", default), given)
    except RuleError as error:
        meant = "".join(like(name, [*OPTIONS, "guard"]) for name in given if f"setting {name!r}" in str(error))
        raise RuleError(f"{error}{meant}") from error.__cause__
    asked = os.environ.get("PACELINE_RULE", "")
    if rule is not None and os.environ.get("PACELINE_RULE_ASKED") and make_rule(asked, {}).text() != chosen.text():
        raise RuleError(
            f"--rule asks for {asked}, and the program names a rule itself, {chosen.text()}: leave --rule out, or let "
            "the program leave its rule to the command line (attach(model, optimizer), without rule=)"
        )
    if guard not in (None, "auto") and not chosen.schedule.compares_contributions:
        raise UnsupportedError(
            f"{chosen.text()} applies each worker's push when it arrives, without others to compare it with; leave "
            "guard away (values that are not finite are refused anyway)"
        )
    options = {name: value for name, value in options.items() if value is not None or name not in OF_LAUNCHER}
    for name, variable in OF_LAUNCHER.items():
        if name not in options and os.environ.get(variable):
            options[name] = NUMBERS.get(name, str)(os.environ[variable])
    if isinstance(options.get("tls"), (str, Path)):
        options["tls"] = TLS.folder(options["tls"])
    settings = Settings(guard=make_guard(guard), **options)
    if os.environ.get("PACELINE_LOG"):
        tolerate_full_disk()
        write_messages()
        mark_attached(os.environ["PACELINE_LOG"])
    for name, variable in ASKED.items():
        if os.environ.get(variable) or (name == "receipts" and settings.receipts is not None):
            settings = extension(OBSERVERS, name).check(replace(settings, observers=(*settings.observers, name)))
    return chosen, settings


class OpenedSink:
    """A tracker that the writing worker opens by `begin`, at its first values, and closes with the run by the tracker's
    method `end`. In an elastic run that worker is rank 0 at the time, which may leave."""

    def __init__(self, begin: Callable[[], Any], end: str) -> None:
        self._begin, self._end = begin, end
        self._tracker: Any = None

    def open(self) -> None:
        """Open it now, so that an error of it comes before the training."""
        if self._tracker is None:
            self._tracker = self._begin()
            self._sink = as_sink(self._tracker)

    def log(self, values: Values, step: int) -> None:
        self.open()
        self._sink.log(values, step)

    def close(self) -> None:
        if self._tracker is not None:
            self._sink.close()
            getattr(self._tracker, self._end)()


def track(run: Run, environment: Mapping[str, str] = os.environ) -> None:
    """Add the trackers that the environment names, for programs that name none; an error where one cannot be used."""
    for variable, begin, end in (TENSORBOARD, _tensorboard, "close"), (WANDB, _wandb, "finish"):
        if environment.get(variable):
            sink = OpenedSink(partial(begin, environment[variable]), end)
            if run.is_main:
                sink.open()
            run.log_to(sink)
    if address := environment.get(METRICS):
        run.serve_metrics(address)


def _tensorboard(directory: str) -> Any:
    with needed("--tensorboard", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(directory)


def _wandb(project: str) -> Any:
    with needed("--wandb", "wandb"):
        wandb = importlib.import_module("wandb")
    return wandb.init(project=project)
