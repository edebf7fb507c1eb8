# SPDX-License-Identifier: Apache-2.0
"""The face: a `Run` hooks the optimizer's step and is what the user holds. Made by :func:`paceline.attach`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from paceline import checkpoint, flow
from paceline.checkpoint import Found, Keeper, Lookup, Moment, new_run
from paceline.checkpoint import reshard as regroup
from paceline.checkpoint.reshard import Old
from paceline.communication import Alone, Transport, connect
from paceline.core import rng
from paceline.core.flat import Modules, averaged_buffers, module_list
from paceline.core.world import World
from paceline.data.sharing.loader_registry import Feed
from paceline.data.sharing.shared_loader import Share
from paceline.errors import CheckpointError, ClosedError, UnsupportedError
from paceline.observe.event_log import Journal
from paceline.observe.sinks.dispatcher import Outlets
from paceline.rules.rule import Rule, is_asynchronous, is_block
from paceline.run import validation
from paceline.run.messages import Messages
from paceline.run.mistakes import Mistakes
from paceline.tuning.period_controller import pacer_for
from paceline.tuning.request import Request
from paceline.tuning.request_files import Mailbox
from paceline.tuning.search_round import MUST_RESUME, Round, RoundOver
from paceline.tuning.tunables import Knobs
from paceline.tuning.tuner import Tuner
from paceline.update import server
from paceline.update.engine import exit as ending
from paceline.update.engine import global_model
from paceline.update.engine.blocks.schedule import Blocks
from paceline.update.engine.collective import Engine
from paceline.update.engine.collective_calls import by_all
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import check_scaler, skipped
from paceline.update.engine.progress import Flow
from paceline.update.engine.protocol import EngineProtocol, GlobalModel
from paceline.update.engine.settings import Settings
from paceline.update.monitor import Monitor


class Run:
    """A model in training under a rule. Made by `attach`.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with paceline.attach(model, optimizer, "bmuf") as run:  # `close` is called at the end
    ...     run.world.size
    1

    Attributes:
        messages: messages of the user's own between workers.
        mistakes: notices what a program is likely to have forgotten.
    """

    def __init__(self, model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> None:
        model = validation.inside(model, rule, settings.group)
        self._model, self._settings, self._attached = model, settings, rule.text()
        self._optimizers = validation.optimizer_list(optimizer)
        validation.check_model(model)
        self._owned = validation.own_parameters(model, self._optimizers)
        validation.check_rule(rule, self._owned)
        check_scaler(rule, settings.scaler)
        self._live = self._join(rule) if settings.control is not None else None
        self._transport: Transport = (
            self._live.transport
            if self._live is not None
            else connect(settings.timeout_s, settings.group, settings.transport, settings.tls)
        )
        self.messages = Messages(self._transport)
        self._closed = False
        self._handles: list[Any] = []
        self._flow = Flow(rule.schedule)
        self._included: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # what living workers gave for objects that were not named yet
        self._engine: EngineProtocol | None = None
        try:
            number = self._live.member.worker if self._live is not None else self.world.rank
            self._watch = Monitor(Journal(settings.log, number), self._transport)
            self._outlets = Outlets(lambda: self.world, self._watch.totals, lambda: self._tuner.knobs.numbers())
            self._watch.told = self._outlets.stands
            self._feed = Feed(self.world, settings.seed, self._watch.epoch, self._watch.waited, self._watch.shared)
            self.mistakes = Mistakes(self.world, self._feed, settings.data)
            self._tuner = self._tuning(rule)
            if self.world.size > 1 or self._live is not None:
                self._engine = self._driver()
                self._feed.leases = self._engine.leases
            self._keeper = self._keeper_for(settings) if settings.checkpoint is not None else None
        except BaseException:
            (self._live or self._transport).close()
            if hasattr(self, "_tuner"):
                self._tuner.close()
            raise
        self._hook()
        if self._elastic is not None:
            self._elastic.entering.put = self._take_given
            self._elastic.entering.take_given()
        elements = sum(p.numel() for _, named in self._owned for _, p in named)
        self._watch.attached(rule.text(), elements, sum(b.numel() for _, b in averaged_buffers(model)))
        self._forget = ending.at_end(self)

    @property
    def world(self) -> World:
        """This worker's coordinates now."""
        return self._transport.world

    @property
    def _elastic(self) -> flow.Elastic | None:
        """The engine, where workers come and go; only there that subsystem is loaded."""
        return self._engine if self._live is not None and isinstance(self._engine, flow.Elastic) else None

    def _join(self, rule: Rule) -> flow.Live:
        """Become a worker of an elastic run."""
        flow.check_rule(rule)
        return flow.join(rule, flow.fingerprint(rule, self._model, self._owned, self._settings), self._settings)

    def _tuning(self, rule: Rule) -> Tuner:
        """What changes while the run goes on; its hooks come before all others."""
        workers = len(set(self.world.hosts)) if rule.within else self.world.size
        alone = is_asynchronous(rule) and self.world.size > 1
        mailbox = Mailbox(self._settings.log, each=alone)
        tuner = Tuner(Knobs(self._optimizers, rule, workers), self.world, mailbox, self._watch.note, each=alone)
        tuner.place = lambda: (self.blocks, self._flow.steps)
        if self.world.size > 1 or self._live is not None:
            buffers = sum(b.numel() for _, b in averaged_buffers(self._model))
            tuner.pacer = pacer_for(rule, self._transport, self._owned, buffers, self._watch.of_blocks)
        return tuner

    def _driver(self) -> EngineProtocol:
        """What carries out the rule among several workers."""
        context = RunContext(
            self._settings,
            self._model,
            self._owned,
            self._transport,
            self._flow,
            self._watch,
            self._feed,
            self._tuner,
        )
        if self._live is not None:
            whole = lambda: (self._state(), self.global_state())  # noqa: E731
            return flow.Elastic(context, self._live, whole)
        if is_asynchronous(self.rule):
            return server.Asynchronous(context)
        return Engine(context)

    def _keeper_for(self, settings: Settings) -> Keeper:
        """What takes steps of its own accord."""
        assert settings.checkpoint is not None
        if is_asynchronous(self.rule) and self.world.size > 1:
            raise UnsupportedError(
                self.world.sign(
                    f"checkpoint= takes steps where all workers stand alike, and under {self.rule.text()} they never "
                    "do; call run.save(path) where they come together, such as behind each epoch"
                )
            )
        shelf = checkpoint.shelf_for(settings.checkpoint)
        # the members of an elastic run hold the same, and nobody can be waited for: the first of them writes
        among, run = (self._transport, new_run()) if self._live is None else (Alone(), self._live.member.run)
        keeper = Keeper(shelf, settings.every_blocks, settings.keep, among, _Kept(self), self._watch.note, run)
        if self._elastic is not None:
            self._elastic.on_pause(keeper.now)
        self._feed.safe = self._place
        if settings.round is not None:
            keeper.demand(MUST_RESUME)
        return keeper

    def _hook(self) -> None:
        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._after_step(optimizer)

        for optimizer in self._optimizers:
            setattr(optimizer, validation.MARK, self)
            if self._engine is not None and self._engine.hooks_gradients:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(after))

    def _take_given(self, given: flow.Given) -> None:
        """Begin with what a living worker gave; what is included later takes its part when it is named."""
        assert self._elastic is not None
        state = self._read("what the others gave", given)
        put = self._elastic.reshard(given)
        self._feed.follow(state["data"][0])
        self._waiting = {k: part for k, part in state["included"].items() if k not in self._included}
        self._put("what the others gave", state)
        self._tuner.load(state["tuning"], asked=False)
        self._elastic.follow(self.rule)
        put()
        rng.restore(state["random"])
        if self._keeper is not None:
            self._keeper.follow()

    # -- inside optimizer.step() ------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is None or not self._engine.gradients_due:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None:
            raise UnsupportedError(
                self.world.sign(
                    f"{type(optimizer).__name__}.step(closure) computes gradients inside the step, where "
                    f"{self.rule.text()} cannot exchange them; call backward() before step(), or use a "
                    "rule that exchanges blocks"
                )
            )
        self._engine.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._closed:
            return
        self.mistakes.stepped()
        if self._engine is not None:
            self._engine.after_step(optimizer)
        if optimizer is not self._optimizers[-1] or skipped(optimizer):
            return
        warm = self._flow.stepped()
        new = self._feed.stepped(self._flow.steps)
        self._watch.stepped(self._flow.steps, self._feed.samples, new)
        if self._engine is not None:
            self._engine.on_step(warm)
        self._feed.entered(self._engine.steps_committed if self._engine is not None else self._flow.steps)
        self._tuner.look()
        if self._keeper is not None:
            keeps = self._engine is None or self._engine.keeps_steps
            (self._keeper.stepped if keeps else self._keeper.follow)()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes exchange no gradients (under block rules they never do).

        Gradients add up on the worker and go with the next pass outside, or before the step. For passes that are not
        training (saliency, adversarial samples on one worker alone), and to save traffic while gradients are
        accumulated; that a program makes several passes before a step is found out without it.
        """
        if self._engine is None:
            yield
            return
        before, self._engine.local = self._engine.local, True
        try:
            yield
        finally:
            self._engine.local = before

    # -- what the user asks for -------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """The rule, with the numbers that it has at present."""
        return self._tuner.rule

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent so far."""
        return self._transport.bytes_sent

    @property
    def minibatches(self) -> int:
        """Steps of the optimizer that this worker has made."""
        return self._flow.steps

    @property
    def samples(self) -> int:
        """Samples that this worker has trained on, counted by `share`."""
        return self._feed.samples

    @property
    def spent(self) -> tuple[float, float, float]:
        """Seconds of computing, of waiting for other workers, and of exchanging, up to the last exchange."""
        compute_s, wait_s, exchange_s = self._watch.spent
        return compute_s, wait_s, exchange_s

    @property
    def blocks(self) -> int:
        """Blocks that have been exchanged; under asynchronous rules, pushes of this worker."""
        return self._engine.exchanged if self._engine is not None else 0

    @property
    def _blocks(self) -> Blocks | None:
        return getattr(self._engine, "blocks", None)

    @property
    def epoch(self) -> int:
        """The epoch of the first shared loader that is under way or comes next; after a resume, where to go on."""
        return self._feed.epoch

    def share(self, loader: Iterable[Any], even: bool = False) -> Share:
        """This worker's part of a loader: every sample of an epoch on exactly one worker.

        Works with a `DataLoader` and with any iterable of batches that every worker sees in the same order. May be
        called once, or anew for each epoch.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> [len(batch) for batch in run.share(torch.randn(20, 4).split(8))]
        [8, 8, 4]
        >>> run.close()

        Args:
            loader: the program's own.
            even: under asynchronous rules a fast worker gets more batches than a slow one, and makes more steps. With
                `even=True` all get the same number, for programs that rely on it, such as a scheduler that is told
                how many steps there will be; fast workers then wait for slow ones at the end.
        """
        self._open()
        validation.check_loader(loader, self.world)
        return self._feed.share(loader, even)

    def log(self, **values: float) -> None:
        """Write values (such as `loss=loss.item()`) to the event log, and to the sinks, at the present minibatch."""
        numbers = self.mistakes.numbers(values, self._closed)
        for name, value in numbers.items():
            self._watch.value(name, value)
        self._outlets.said(numbers, self._flow.steps)

    def log_to(self, sink: Any, *, every_s: float = 1.0, each: bool = False) -> None:
        """Send what `log` gets to a sink as well, and the run's own numbers under `paceline/`: block, bytes, seconds
        of computing, waiting and exchanging, rates, and settings that can be tuned.

        A thread writes: a sink that is slow keeps nobody waiting (what finds no room is dropped, and counted), and one
        that fails is a warning. The step is the number of this worker's minibatches.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> class Print:
        ...     def log(self, values: dict[str, float], step: int) -> None:
        ...         print(step, values)
        ...
        ...     def close(self) -> None:
        ...         print("over")
        >>> run.log_to(Print())
        >>> run.log(loss=0.5)
        >>> run.close()
        0 {'loss': 0.5}
        over

        Args:
            sink: a SummaryWriter, what `wandb.init()` or `trackio.init()` gave, the module `mlflow` with a run under
                way, or anything with `log(values, step)`. What can be begun twice is begun by the first worker alone:
                others may pass None.
            every_s: least time between two reports of the run's own numbers, seconds.
            each: on every worker, where by default the first one (rank 0) alone writes.

        Raises:
            UnsupportedError: `sink` is nothing that takes values.
        """
        self._open()
        if sink is not None:
            self._outlets.add_feeder(sink, self.world.sign, every_s, each)

    def serve_metrics(self, address: str) -> str:
        """Serve this worker's numbers for Prometheus, at `http://ADDRESS/metrics`, until the run is closed.

        Args:
            address: HOST:PORT; worker k of its host takes PORT + k, and port 0 is any that is free.

        Returns:
            Where it listens, as HOST:PORT.

        Raises:
            UnsupportedError: the address is none, or cannot be had.
        """
        self._open()
        return self._outlets.serve(address)

    def tune(self, *, revert: bool = False, **settings: Any) -> Request:
        """Change settings while the run goes on, on all workers at the same block; one worker asks, or several.

        It takes effect when the next exchange is over, between two steps; under overlap, when the next exchange that
        begins has landed. Under asynchronous rules each worker takes it up by itself, before a later push, from the log
        directory. With one worker it takes effect at once. The event log of every worker says what has changed and
        when, and checkpoints hold it. A request on its way belongs to the checkpoint of the worker that made it.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> run.tune(lr=0.05).applied
        True
        >>> optimizer.param_groups[0]["lr"]
        0.05
        >>> run.tune(revert=True).applied, optimizer.param_groups[0]["lr"]
        (True, 0.1)
        >>> run.close()

        Args:
            revert: undo the last change instead.
            settings: `lr`, `lr_factor`, `momentum`, `betas`, `weight_decay`, `eps` of the optimizers, for all groups
                or for some, as in `lr={0: 0.1, 1: 0.01}`; `period`, `gain`, `outer_momentum`, `outer_lr` of the rule,
                where it has them. See :mod:`paceline.tuning.tunables` for rates under a scheduler.

        Returns:
            What becomes of it: `applied`, `refused`, `block`, `minibatch`.

        Raises:
            RuleError, UnsupportedError: it cannot be; nothing is changed, and nobody hears of it.
        """
        self._open()
        return self._tuner.ask(settings, revert)

    @by_all("run.merge()")
    def merge(self) -> None:
        """Bring what all workers have done so far into the global model; every worker calls it at the same place.

        Under block rules the block that is under way ends here, however many minibatches it has, and its result is
        waited for; the next one begins. Under asynchronous rules what is under way is waited for, and all take the same
        values. Where gradients are exchanged every step is merged already, and nothing happens. For the end of an
        epoch, before the global model is evaluated or kept.
        """
        self._open()
        if self._engine is not None:
            self._engine.merge()
            self._feed.entered(self._engine.steps_committed)

    def include(self, **objects: Any) -> None:
        """Name what belongs into checkpoints besides model and optimizer: schedulers, a scaler, anything with a
        `state_dict` and a `load_state_dict`."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                kind = type(thing).__name__
                raise UnsupportedError(f"{name} is a {kind}, which has no state_dict and load_state_dict")
            self._included[name] = thing
            if name in self._waiting:
                thing.load_state_dict(self._waiting.pop(name))

    @property
    def _ahead(self) -> GlobalModel | None:
        """What knows the global model, where the user's differs from it."""
        return self._engine.global_model if self._engine is not None else None

    def global_state(self) -> dict[str, Tensor]:
        """The global model as a state dictionary of the (unwrapped) model; copies, on the model's device."""
        return global_model.global_state(self._model, self._ahead.global_tensors() if self._ahead else {})

    def model_for_export(self) -> Any:
        """A copy of the model (or models) with the global parameters and the averaged buffers.

        Under block momentum this is theta, not the look-ahead start from which the workers go on. Needs no
        communication; between exchanges it is the global model of the last one.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> exported = run.model_for_export()
        >>> torch.equal(exported.weight, model.weight), exported is model
        (True, False)
        >>> run.close()
        """
        return global_model.twin(self._model, self._ahead.global_tensors() if self._ahead else {})

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the user's model holds the global parameters (for evaluation); afterwards its own again.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> with run.global_model() as whole:
        ...     whole is model
        True
        >>> run.close()
        """
        with global_model.swapped(self._ahead.global_parts if self._ahead else []):
            yield self._model

    # -- checkpoints ------------------------------------------------------------------------------

    @by_all("run.checkpoint()")
    def checkpoint(self) -> bool:
        """Take the step that is due, if one is; True where that was so.

        With `attach(..., checkpoint=DIR)` one falls due every `every_blocks` exchanges. It is taken at the top of the
        program's loop, where schedulers and the like have made their steps too: programs that go through `run.share`
        need not do anything, others call this at the top of their loop, on every worker. Steps are directories
        `DIR/step-000000120`, named by the minibatches that each worker had made, with the files of `save`; the newest
        `keep` stay. The loop stops for a copy into host memory; a thread does the rest. What cannot be written is a
        warning, and training goes on.
        """
        self._open()
        take = self._place() if self._feed.idle else None
        if take is None:
            return False
        take()
        return True

    def _place(self) -> Callable[[], None] | None:
        """An iteration of the program's loop is over; what is returned, if anything, takes the step that is due."""
        take = self._keeper.place() if self._keeper is not None else None
        return partial(self._end_round, take) if take is not None and self._settings.round is not None else take

    def _end_round(self, take: Callable[[], None]) -> None:
        """Take the step with which a round of a search is over, and end the program."""
        take()
        self.close()
        raise RoundOver()

    def _begin_round(self, now: Round) -> None:
        """Begin a round of a search with its values, on all workers before the next step."""
        if not now.tune:
            return
        self._tuner.knobs.check(now.tune)  # on all, so that all are refused alike
        request = self.tune(**now.tune) if self.world.rank == 0 else None
        if isinstance(self._engine, Engine):
            self._tuner.hear(self._transport)
            self._engine.retune()
        if request is not None and not request.applied:
            raise UnsupportedError(self.world.sign(f"the values of this round cannot be: {request.refused}"))

    @by_all("run.save(..)")
    def save(self, path: str | Path, **objects: Any) -> None:
        """Write a checkpoint of everything; every worker calls it at the same place of the program.

        >>> import tempfile, torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> place = tempfile.mkdtemp() + "/saved"
        >>> run.save(place)
        >>> before = model.weight.detach().clone()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> run.resume(place)
        True
        >>> torch.equal(model.weight, before)
        True
        >>> run.close()

        Args:
            path: a directory, made or replaced in one piece.
            objects: as for `include`.

        Raises:
            CheckpointError: it could not be written (on every worker alike); an older one at `path` is untouched.
        """
        self._open()
        self.include(**objects)
        checkpoint.save(Path(path), self._transport, self._about(), self._state(), self.global_state())
        self._watch.note("save", path=str(path))

    def _about(self) -> dict[str, Any]:
        # the rule as it was attached: what has been tuned since then is in the state
        made = self._flow.steps if self._live is None else self._live.applied
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        return {"rule": self._attached, "minibatches": made, "blocks": self.blocks, "optimizers": kinds}

    @by_all("run.resume(..)")
    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """Put everything back to where `save` was called, or a step was taken.

        Without a path, from the newest step of `attach(..., checkpoint=...)` whose sums are right on all workers; one
        that is damaged is named, and the one before it is taken. False where there is no step: a fresh start. A path or
        URL may name a checkpoint, or a directory of steps, of which the newest is taken in the same way.

        Call it before the training loop. The loop goes on at `run.epoch`, and `share` in the middle of that epoch.

        On as many workers as saved it, the same bits follow as if the run had never stopped. On another number M the
        training goes on from the same global model, and M = 1 is the model and the optimizer without any rule:

        - From the checkpoint come the global model, outer state (block momentum, outer moments), the count of steps,
          schedulers and whatever else is included, those of rank 0 where workers differ, and the workers' positions in
          the data. A gain that follows the number of workers follows the new one.
        - The pieces of an asynchronous server are cut anew, with the optimizer's state over them.
        - An optimizer that steps on the workers gets the mean of their states where a block rule lets them differ:
          floating-point tensors, and rank 0's for the rest. Under local_state="compensate" and "reset" it gets what a
          block begins with.
        - The data go on with what was not in the global model, each sample of the epoch once.
        - Begun anew are: a block under way (all begin one from the global model, with the rule's look-ahead), what
          codecs remember (residuals, momentum, factors), simulated clocks, paces, replicas, and what delays are
          compensated from. A result on its way behind the next block is in the model already.
        - Random generators are those of the same rank, where there was one, and else follow from the seed and the rank.

        All workers read the files of the old ranks that they need: on a file system that they share, or from copies.

        Raises:
            CheckpointError: there is none at `path`, it or all steps are damaged, or it belongs to another program; on
                every worker alike.
        """
        self._open()
        self.include(**objects)

        def resume() -> bool:
            start, now = self._settings.start, self._settings.round
            named = None if now is not None and start is not None else path
            with Lookup(named, self._settings.checkpoint, self._transport, start) as lookup:
                found = lookup.found()
                for why in found.damaged.values():
                    self._watch.damaged(why)
                if found.manifest:
                    self._go_on(found)
                if self._keeper is not None:
                    self._keeper.resumed(*lookup.own_steps(found))
            if now is not None:
                self._begin_round(now)
            return bool(found.manifest)

        return self._elastic.entering.resume(resume) if self._elastic is not None else resume()

    def _go_on(self, found: Found) -> None:
        """Go on from what was found."""
        manifest, path = found.manifest, found.name
        if manifest["rule"] != self._attached:
            raise CheckpointError(
                f"{path} was made under the rule {manifest['rule']}, and this run has {self._attached}; "
                "use the same rule, or begin a new run from its global model"
            )
        regroup.check_kinds(path, self._optimizers, manifest.get("optimizers"))
        if found.state is not None and self._live is None:
            self._load(path, found.state)
        else:
            self._regroup(path, Old(manifest))
        self._watch.note("resume", path=path)

    def snapshot(self) -> Any:
        """Everything that a checkpoint holds, in memory; every worker calls it at the same place, between two steps.

        Raises `UnsupportedError` in the warm-up of a block rule, and under asynchronous rules.
        """
        self._open()
        if self.world.size > 1 and (is_asynchronous(self.rule) or (is_block(self.rule) and self._flow.lockstep)):
            raise UnsupportedError(
                self.world.sign(
                    f"{self.rule.text()} cannot go back to a state in memory now: not in a warm-up, and not "
                    "where workers exchange each by itself"
                )
            )
        return copy.deepcopy(self._state())

    @by_all("run.restore(..)")
    def restore(self, snapshot: Any) -> None:
        """Go back to a `snapshot`, bit for bit; every worker calls it, between two steps. Gradients are dropped."""
        self._open()
        if not isinstance(snapshot, dict):
            raise UnsupportedError(f"restore takes what run.snapshot() gave, got a {type(snapshot).__name__}")
        self._state()  # what is under way comes to its end
        self._load("the snapshot", copy.deepcopy(snapshot))
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def scale_rates(self, factor: float) -> None:
        """Multiply all learning rates of this worker at once, until a snapshot is restored; for trials."""
        rates = self._tuner.knobs.rates
        for number in range(len(rates.groups())):
            rates.scale(number, factor * rates.factor(number))

    def _state(self) -> dict[str, Any]:
        return {
            "model": global_model.plain_state(self._model),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "included": {name: thing.state_dict() for name, thing in self._included.items()},
            "exchange": self._engine.state() if self._engine is not None else {},
            "tuning": self._tuner.state(),
            "flow": [self._flow.steps, self._flow.warm],
            "data": self._feed.state(),
            "random": rng.capture(),
        }

    def _load(self, path: str | Path, state: dict[str, Any]) -> None:
        self._check_included(path, state["included"])
        regroup.check_model(global_model.plain_state(self._model), state["model"])
        regroup.check_optimizers(self._optimizers, state["optimizers"])
        self._put(path, state)
        self._tuner.load(state["tuning"])
        if self._engine is not None:
            self._engine.follow(self.rule)
            self._engine.load(state["exchange"])
        self._feed.load(state["data"])
        self._transport.barrier()  # nobody asks for data before the ledger is loaded
        rng.restore(state["random"])

    def _check_included(self, path: str | Path, saved: Iterable[str]) -> None:
        missing = sorted(set(saved) ^ set(self._included))
        if missing:
            raise CheckpointError(
                f"{path} and this run do not include the same objects: {', '.join(missing)} stand in one of them only; "
                "pass the same names to save and resume"
            )

    def _put(self, path: str | Path, state: dict[str, Any]) -> None:
        """Give model, optimizers and included objects what was saved of them."""
        for prefix, module in module_list(global_model.unwrapped(self._model)):
            part = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
            try:
                module.load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{path} does not fit the model: {error}") from error
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in self._included.keys() & state["included"].keys():
            self._included[name].load_state_dict(state["included"][name])
        self._flow.steps, self._flow.warm = state["flow"]

    # -- from another number of workers -----------------------------------------------------------

    def _regroup(self, path: str | Path, old: Old) -> None:
        """Read and check everything, and only when all workers have done so change what is here."""
        problem, state, put = "", {}, None
        try:
            self._check_included(path, old.keys(0, "included"))
            state = self._read(path, old)
            put = self._engine.reshard(old) if self._engine is not None else None
        except (OSError, ValueError, SafetensorError) as error:  # the others are waiting for a word
            problem = str(error)
        checkpoint.all_well(self._transport, problem, f"{path} cannot be resumed")
        self._feed.regroup(state["data"])  # the first, because it may refuse
        self._put(path, state)
        self._tuner.load(state["tuning"], asked=False)
        if put is not None and self._engine is not None:
            self._engine.follow(self.rule)
            put()
        self._transport.barrier()
        rng.restore(state["random"])

    def _read(self, path: str | Path, old: Old) -> dict[str, Any]:
        """What this worker begins with, besides what the exchanges hold."""
        state = {
            "model": old.model(),
            "optimizers": self._old_optimizers(old),
            "included": old.part(0, "included"),
            "flow": old.part(0, "flow"),
            "tuning": old.part(0, "tuning"),
            "data": [old.part(rank, "data") for rank in range(old.size)],
            "random": regroup.random_state(old, self.world.rank, self._settings.seed),
        }
        regroup.check_model(global_model.plain_state(self._model), state["model"])
        regroup.check_optimizers(self._optimizers, state["optimizers"])
        return state

    def _old_optimizers(self, old: Old) -> list[dict[str, Any]]:
        """State dictionaries for the optimizers: of one worker, where all held the same or none held any."""
        at_owners = server.steps_at_owners(self.rule)
        if at_owners and self._engine is None:
            return server.whole_optimizers(old, self._model, self._owned, self.rule.sharded)
        apart = not at_owners and not replace(self._flow, warm=old.part(0, "flow", 1)).lockstep
        if self._blocks is not None and not self._blocks.keeps_state:
            apart = False  # a block begins with nothing of it
        found: list[dict[str, Any]] = regroup.mean_optimizers(old) if apart else old.part(0, "optimizers")
        return found

    # -- the end ----------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._closed:
            raise ClosedError(self.world.sign("this run is closed; attach again to go on"))

    def close(self) -> None:
        """Come to the end together: merge what is left of the last block, wait for those who have more data, and
        leave the global model in the user's model. May be called again."""
        if self._closed:
            return
        try:
            if self._keeper is not None:
                self._keeper.leave(self._feed.leads)
            if self._engine is not None:
                self._engine.shutdown()
            if self._keeper is not None:
                self._keeper.finish(complain=True)
            self.mistakes.close()
        finally:
            self._detach()

    def _detach(self) -> None:
        """Unhook and let the connection go, without a word to the others."""
        self._closed = True
        self._forget()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            setattr(optimizer, validation.MARK, None)
        self._tuner.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._engine is not None:
            self._engine.close()
        self._transport.close()
        if self._keeper is not None:
            self._keeper.finish()  # alone, what is being written is finished; others hear from the closed connection
        self._watch.close(self.blocks)
        self._outlets.close()

    def abandon(self) -> None:
        """Leave at once, after an error of this worker's own: the others find out from the closed connection."""
        if not self._closed:
            self._detach()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._watch.note("error", message=f"{type(error).__name__}: {error}")
        self.abandon()


class _Kept:
    """What the keeper of a run's steps is given of it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def moment(self) -> Moment:
        """Where the exchanges stand; a worker that is alone counts those that it would have made."""
        moment = self._run._engine.moment if self._run._engine is not None else None
        return moment if moment is not None else Moment(self._run._flow.exchanges)

    def about(self) -> dict[str, Any]:
        """What the manifest says."""
        return self._run._about()

    def kept(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """The state, and the global model where it is another one than the worker's."""
        run = self._run
        state = run._state()
        ahead = run._ahead
        return state, global_model.global_parts(run._model, ahead.global_tensors()) if ahead is not None else None
