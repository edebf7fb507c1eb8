# SPDX-License-Identifier: Apache-2.0
"""`attach`: the one function that every program needs.

It reads the options of `paceline run` from the environment. :mod:`paceline.communication.schedulers` reads this
worker's rank and the number of workers.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from paceline.communication.sockets.tls import TLS
from paceline.core.flat import Modules
from paceline.errors import OverError, RuleError, UnsupportedError
from paceline.extensions import OBSERVERS, extension
from paceline.observe.standard_streams import tolerate_full_disk
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline.run import attach_marker
from paceline.run.run import Run
from paceline.run.tracking import track
from paceline.update.engine import exit_handling
from paceline.update.engine.settings import Settings
from paceline.update.exchange.outliers import Guard, make_guard

UNCHANGED = (
    "seed",
    "outer_state",
    "scaler",
    "group",
    "transport",
    "checkpoint",
    "every_blocks",
    "keep",
    "data",
    "receipts",
)
"""Fields of `Settings` that take the arguments of `attach` unchanged."""
ASKED = {"receipts": "PACELINE_RECEIPTS", "search": "PACELINE_ROUND"}
"""Observers, and the variables that ask for them."""
DEFAULT = "auto"
"""The rule of a program that names none, without `--rule`."""


def attach(
    model: Modules,
    optimizer: Optimizer | list[Optimizer],
    rule: Rule | str | None = None,
    *,
    log: str | Path | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
    outer_state: str = "device",
    scaler: Any = None,
    group: Any = None,
    tls: TLS | str | Path | None = None,
    transport: str = "auto",
    guard: Guard | str | None = "auto",
    checkpoint: str | Path | None = None,
    every_blocks: int = 100,
    keep: int = 3,
    data: str = "shared",
    receipts: str | Path | None = None,
    **rule_settings: Any,
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
        timeout_s: deadline of every wait for another worker, seconds; None takes that of `paceline run`, else 600.
        seed: of the order of samples in `run.share`; the same on every worker.
        outer_state: where to keep the rule's state: "device", or "host" to save device memory.
        scaler: the program's GradScaler, if gradients are exchanged.
        group: the torch.distributed group whose members are the workers; None for all processes.
        tls: certificates for the connections of asynchronous rules and of `transport="channel"`: a `paceline.TLS`, or
            the folder of `cert.pem`, `key.pem` and `ca.pem`; None takes the folder of `paceline run`, if any, else
            connections are not encrypted.
        transport: how processes exchange: "auto" is what `paceline run --transport` names, else torch.distributed;
            "channel" is rings over paceline's own sockets, with `tls` for untrusted networks; "mpi" is MPI, for
            processes that `mpiexec` started. Over the last two tensors travel through host memory, unless MPI says
            that it takes CUDA memory.
        guard: leave contributions far larger than usual out of the mean, like those with inf or nan: "auto" judges
            blocks, "outliers" gradients as well, a `paceline.Guard` sets the limits, and None accepts all.
        checkpoint: directory, or URL of an object store, in which the newest steps of the run are kept, so that
            `run.resume()` continues from there with the same bits; see `Run.checkpoint`. None takes the place of
            `paceline run`, if any, and else keeps none.
        every_blocks: exchanges from one step to the next: blocks (of a fragment, if the model has several), or
            minibatches under rules without blocks.
        keep: how many steps are kept; the store needs room for one more.
        data: "shared" warns of a DataLoader that the program trains on without `run.share`; "own" means that each
            worker has its own data (samples drawn at random, files by rank).
        receipts: directory in which each worker writes what it brought to and took from every merge, for
            `paceline verify`; None takes that of `paceline run --receipts`, if any.
        rule_settings: settings of a rule given by name, such as `period=16`.

    Returns:
        The run; use it as a context manager, or call `close()` at the end.

    Raises:
        RuleError: the rule or one of its settings does not exist, or `paceline run --rule` asks for another one.
        UnsupportedError: the rule cannot serve the model or the optimizer.
        CheckpointError: `checkpoint` cannot be read.
        MismatchError: the workers disagree on the rule or the model; raised on every worker.
    """
    chosen = prepare(
        rule,
        with_period=_with_period(optimizer),
        log=log,
        timeout_s=timeout_s,
        seed=seed,
        outer_state=outer_state,
        scaler=scaler,
        group=group,
        tls=tls,
        transport=transport,
        guard=guard,
        checkpoint=checkpoint,
        every_blocks=every_blocks,
        keep=keep,
        data=data,
        receipts=receipts,
        **rule_settings,
    )
    try:
        run = Run(model, optimizer, *chosen)
    except OverError as error:
        exit_handling.exit_after_end(error)
    try:
        track(run)
    except BaseException:
        run.abandon()
        raise
    return run


def prepare(
    rule: Rule | str | None = None,
    *,
    with_period: str = "bmuf",
    log: str | Path | None = None,
    timeout_s: float | None = None,
    tls: TLS | str | Path | None = None,
    guard: Guard | str | None = "auto",
    **given: Any,
) -> tuple[Rule, Settings]:
    """The rule and the settings from the arguments of `attach` after model and optimizer; `given` holds further fields
    of `Settings` and settings of the rule, `with_period` is the rule of a program that gives a period and no rule."""
    unchanged = {name: given.pop(name) for name in UNCHANGED if name in given}
    if unchanged.get("checkpoint") is None:
        unchanged["checkpoint"] = os.environ.get("PACELINE_CHECKPOINT") or None
    if os.environ.get("PACELINE_LOG"):
        tolerate_full_disk()
    default = with_period if "period" in given else DEFAULT
    chosen = make_rule(rule if rule is not None else os.environ.get("PACELINE_RULE", default), given)
    if rule is not None:
        _check_asked_rule(chosen)
    if guard not in (None, "auto") and not chosen.schedule.compares_contributions:
        raise UnsupportedError(
            f"{chosen.text()} applies each worker's push when it arrives, without others to compare it with; leave "
            "guard away (values that are not finite are refused anyway)"
        )
    settings = Settings(
        log=log if log is not None else os.environ.get("PACELINE_LOG"),
        timeout_s=timeout_s if timeout_s is not None else float(os.environ.get("PACELINE_TIMEOUT_S", "600")),
        tls=_tls(tls if tls is not None else os.environ.get("PACELINE_TLS") or None),
        control=os.environ.get("PACELINE_CONTROL") or None,
        relay=os.environ.get("PACELINE_RELAY") or None,
        exchanged=os.environ.get("PACELINE_EXCHANGED") or None,
        guard=make_guard(guard),
        start=os.environ.get("PACELINE_RESUME") or None,
        **unchanged,
    )
    attach_marker.mark_attached()
    return chosen, _observed(settings)


def _with_period(optimizer: Any) -> str:
    """The block rule that suits what the program gives as its optimizer; the run checks it later."""
    every = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return "bmuf_adam" if every and all(isinstance(one, (Adam, AdamW)) for one in every) else "bmuf"


def _check_asked_rule(chosen: Rule) -> None:
    """Refuse the program's rule if `--rule` asks for another."""
    asked = os.environ.get("PACELINE_RULE", "")
    if not os.environ.get("PACELINE_RULE_ASKED") or make_rule(asked, {}).text() == chosen.text():
        return
    raise RuleError(
        f"--rule asks for {asked}, and the program names a rule itself, {chosen.text()}: leave --rule out, or let the "
        "program leave its rule to the command line (attach(model, optimizer), without rule=)"
    )


def _observed(settings: Settings) -> Settings:
    """The settings with what the observers need that `receipts=` or the environment asks for."""
    for name, variable in ASKED.items():
        if os.environ.get(variable) or (name == "receipts" and settings.receipts is not None):
            settings = extension(OBSERVERS, name).check(replace(settings, observers=(*settings.observers, name)))
    return settings


def _tls(tls: TLS | str | Path | None) -> TLS | None:
    return TLS.folder(tls) if isinstance(tls, (str, Path)) else tls
