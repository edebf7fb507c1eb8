# SPDX-License-Identifier: Apache-2.0
"""The face: a `Run` hooks the optimizer's step and is what the user holds. Made by :func:`paceline.attach`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import checkpoint, checks, ending, export, randomness
from paceline.amp import ScalerHook, skipped
from paceline.backward import PassEnd
from paceline.blocks import Blocks
from paceline.data import Feed, Share
from paceline.errors import CheckpointError, ClosedError, UnsupportedError
from paceline.exchange import WARM, Chunk, Exchanger, Header, Meeting
from paceline.flow import Flow
from paceline.fragments import Fragment, Modules, averaged_buffers, fragments, module_list
from paceline.gradient_update import GradientUpdate, Occasion
from paceline.journal import Journal
from paceline.rule import Rule, is_block
from paceline.settings import Settings
from paceline.transport import Transport, connect
from paceline.update import Work
from paceline.watch import Watch


def _nothing(kind: int) -> list[Chunk]:
    return []


class Run:
    """A model in training under a rule. Made by `attach`.

    Attributes:
        rule: the rule.
        world: this worker's coordinates (rank, size, host).
    """

    def __init__(self, model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> None:
        self.rule, self._model, self._settings = rule, model, settings
        self._optimizers = checks.optimizer_list(optimizer)
        checks.check_model(model)
        self._owned = checks.own_parameters(model, self._optimizers)
        checks.check_rule(rule, self._owned)
        self._transport: Transport = connect(settings.timeout_s, settings.group)
        self.world = self._transport.world
        self._closed = self._local = False
        self._handles: list[Any] = []
        self._flow = Flow(rule.schedule)
        self._included: dict[str, Any] = {}
        self._scaler_hook: ScalerHook | None = None
        self._blocks: Blocks | None = None
        self._gradients: list[GradientUpdate] = []
        try:
            if self.world.size > 1:
                self._join_cluster()
            self._watch = Watch(Journal(settings.log, self.world.rank), self._transport)
        except BaseException:
            self._transport.close()
            raise
        self._feed = Feed(self.world, settings.seed, self._watch.epoch)
        self._hook()
        elements = sum(p.numel() for _, named in self._owned for _, p in named)
        self._watch.attached(rule.text(), elements, sum(b.numel() for _, b in averaged_buffers(model)))
        self._forget = ending.at_end(self)

    # -- setting up -------------------------------------------------------------------------------

    def _join_cluster(self) -> None:
        settings = {"seed": self._settings.seed, "outer_state": self._settings.outer_state}
        settings |= checks.about_optimizers(self._owned)
        checks.check_same(self._transport, self.rule, self._start_parts(), settings)
        ending.claim(self._transport, self._owned)
        checks.broadcast_start(self._transport, self._start_parts())
        self._exchanger = Exchanger(self._transport, self.rule.codec, self.rule.topology)
        if is_block(self.rule):
            device = torch.device("cpu") if self._settings.outer_state == "host" else None
            self._blocks = Blocks(self.rule, self._exchanger, self._model, self._owned, device)
            checks.broadcast_start(self._transport, [lane.fragment for lane in self._blocks.moment_parts])
            self._blocks.capture_moments()
        if self._flow.lockstep:
            self._exchange_gradients_every_step()

    def _exchange_gradients_every_step(self) -> None:
        last = len(self._owned) - 1
        occasion = Occasion(self._gradients_due, self._work, self._watched, PassEnd(), early=last == 0)
        self._gradients = [
            GradientUpdate(
                self.rule,
                self._exchanger,
                1 + number,
                optimizer,
                named,
                self._model if number == last else None,
                occasion,
            )
            for number, (optimizer, named) in enumerate(self._owned)
        ]
        if self._settings.scaler is not None:
            self._scaler_hook = ScalerHook(self._settings.scaler, self._settle_gradients, self._is_ours)

    def _hook(self) -> None:
        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._after_step(optimizer)

        for optimizer in self._optimizers:
            setattr(optimizer, checks.MARK, self)
            if self._gradients:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(after))

    # -- inside optimizer.step() ------------------------------------------------------------------

    def _gradients_due(self) -> bool:
        return self._flow.lockstep and not self._closed and not self._local

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one in self._optimizers) and self._gradients_due()

    def _work(self) -> Work:
        return Work(1, self._flow.steps, self._feed.factor)

    @contextlib.contextmanager
    def _watched(self, met: list[Meeting]) -> Iterator[None]:
        """Time an exchange of gradients, and write it down."""
        self._watch.begin()
        began, timing = time.perf_counter(), self._exchanger.timing
        yield
        timing.exchange_s = time.perf_counter() - began - timing.wait_s
        self._watch.end(timing, met[0], block=0, warmup=is_block(self.rule))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_ours(optimizer):
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
        if self._scaler_hook is not None and id(optimizer) in self._scaler_hook.done:
            return
        self._settle_gradients(optimizer)

    def _number(self, optimizer: Optimizer) -> int:
        return next(k for k, one in enumerate(self._optimizers) if one is optimizer)

    def _settle_gradients(self, optimizer: Optimizer) -> None:
        """Before the step: exchange what backward has not."""
        checks.check_unchanged(self._owned)
        update = self._gradients[self._number(optimizer)]
        if not update.landed and self._scaler_hook is None and self._flow.steps == 0:
            checks.refuse_hidden_scaler()
        update.before_step()
        scaled = self._scaler_hook is not None or getattr(optimizer, "found_inf", None) is not None
        if update.problem is not None and not scaled:  # else the scaler finds it on every worker, and all skip
            raise update.problem

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._closed:
            return
        if self._gradients:
            self._gradients[self._number(optimizer)].stepped()
        if optimizer is not self._optimizers[-1] or skipped(optimizer):
            return
        warm = self._flow.stepped()
        new = self._feed.stepped()
        self._watch.stepped(self._flow.steps, self._feed.samples, new)
        if self.world.size == 1:
            return
        if warm:
            self._end_warmup()
        elif self._blocks is not None and not self._flow.lockstep:
            self._advance(self._blocks)

    def _advance(self, blocks: Blocks) -> None:
        """A step of a block was made: apply what has had its time, send what is due."""
        blocks.turns.stepped()
        for fragment in blocks.landing():
            self._land(fragment)
        if blocks.due():
            self._begin_block(leaving=False)

    def _begin_block(self, leaving: bool) -> Meeting | None:
        """End a fragment's block; the meeting where its result is waited for."""
        assert self._blocks is not None
        if not leaving:  # a run that was told to close must be able to: with what it owned at attach
            checks.check_unchanged(self._owned)
        fragment = self._blocks.next
        self._watch.begin()
        self._blocks.begin(self._flow.steps, leaving)
        if fragment in self._blocks.turns.made:
            self._watch.sent(self._exchanger.timing)
            return None
        return self._land(fragment, begun=True)

    def _land(self, fragment: int, begun: bool = False) -> Meeting:
        assert self._blocks is not None
        if not begun:
            self._watch.begin()
        meeting = self._blocks.land(fragment)
        self._watch.end(self._exchanger.timing, meeting, block=self._blocks.block, warmup=False)
        return meeting

    def _end_warmup(self) -> None:
        """The synchronous steps are over: everybody, those too who have left, takes the same start."""
        self._take_start(self._exchanger.meet(self._bare_header(WARM, leaving=False), _nothing))

    def _take_start(self, meeting: Meeting) -> None:
        assert self._blocks is not None
        self._flow.warm = True
        self._blocks.prepare()
        self._even_out(meeting, [lane.fragment for lane in self._blocks.lanes])
        self._blocks.capture()
        self._stop_gradients()

    def _stop_gradients(self) -> None:
        """Gradients are exchanged no more."""
        for update in self._gradients:
            update.close()
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
            self._scaler_hook = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes and steps exchange no gradients (block rules exchange none anyway).

        Gradients add up on the worker and go with the next pass outside. For passes that are not training (saliency,
        adversarial samples on one worker alone), and to save traffic while gradients are accumulated; that a program
        makes several passes before a step is found out without it.
        """
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    # -- what the user asks for -------------------------------------------------------------------

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
    def blocks(self) -> int:
        """Blocks that have been exchanged."""
        return self._blocks.block if self._blocks is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch of the first shared loader that is under way or comes next; after a resume, where to go on."""
        return self._feed.epoch

    def share(self, loader: Iterable[Any]) -> Share:
        """This worker's part of a loader: every sample of an epoch on exactly one worker.

        Works with a `DataLoader` and with any iterable of batches that every worker sees in the same order. May be
        called once, or anew for each epoch.
        """
        self._open()
        return self._feed.share(loader)

    def log(self, **values: float) -> None:
        """Write values (such as `loss=loss.item()`) to the event log, at the present minibatch."""
        for name, value in values.items():
            self._watch.value(name, float(value))

    def include(self, **objects: Any) -> None:
        """Name what belongs into checkpoints besides model and optimizer: schedulers, a scaler, anything with a
        `state_dict` and a `load_state_dict`."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                kind = type(thing).__name__
                raise UnsupportedError(f"{name} is a {kind}, which has no state_dict and load_state_dict")
            self._included[name] = thing

    @property
    def _ahead(self) -> Blocks | None:
        """The block updates, where the user's model differs from the global one."""
        return None if self._flow.lockstep or self._closed else self._blocks

    def global_state(self) -> dict[str, Tensor]:
        """The global model as a state dictionary of the (unwrapped) model; copies, on the model's device."""
        return export.global_state(self._model, self._ahead.global_tensors() if self._ahead else {})

    def model_for_export(self) -> Any:
        """A copy of the model (or models) with the global parameters and the averaged buffers.

        Under block momentum this is theta, not the look-ahead start from which the workers go on. Needs no
        communication; between exchanges it is the global model of the last one.
        """
        return export.twin(self._model, self._ahead.global_tensors() if self._ahead else {})

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the user's model holds the global parameters (for evaluation); afterwards its own again."""
        with export.swapped(self._ahead.global_lanes if self._ahead else []):
            yield self._model

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, path: str | Path, **objects: Any) -> None:
        """Write a checkpoint of everything; every worker calls it at the same place of the program.

        Args:
            path: a directory, made or replaced in one piece.
            objects: as for `include`.

        Raises:
            CheckpointError: it could not be written (on every worker alike); an older one at `path` is untouched.
        """
        self._open()
        self.include(**objects)
        about = {"rule": self.rule.text(), "minibatches": self._flow.steps, "blocks": self.blocks}
        checkpoint.save(Path(path), self._transport, about, self._state(), self.global_state())
        self._watch.note("save", path=str(path))

    def resume(self, path: str | Path, **objects: Any) -> None:
        """Put everything back to where `save` was called; the same bits follow as if the run had never stopped.

        Call it before the training loop. The loop goes on at `run.epoch`, and `share` in the middle of that epoch.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another program or number of workers.
        """
        self._open()
        self.include(**objects)
        manifest, state = checkpoint.load(Path(path), self._transport)
        if manifest["rule"] != self.rule.text():
            raise CheckpointError(
                f"{path} was made under the rule {manifest['rule']}, and this run has {self.rule.text()}; "
                "use the same rule, or begin a new run from its global model"
            )
        self._load(path, state)
        self._watch.note("resume", path=str(path))

    def _state(self) -> dict[str, Any]:
        return {
            "model": export.plain_state(self._model),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "included": {name: thing.state_dict() for name, thing in self._included.items()},
            "blocks": self._blocks.state() if self._blocks is not None else [],
            "gradients": [update.state() for update in self._gradients],
            "sequence": self._exchanger.sequence if self.world.size > 1 else 0,
            "flow": [self._flow.steps, self._flow.warm],
            "data": self._feed.state(),
            "random": randomness.capture(),
        }

    def _load(self, path: str | Path, state: dict[str, Any]) -> None:
        missing = sorted(set(state["included"]) ^ set(self._included))
        if missing:
            raise CheckpointError(
                f"{path} and this run do not include the same objects: {', '.join(missing)} stand in one of them only; "
                "pass the same names to save and resume"
            )
        for prefix, module in module_list(export.unwrapped(self._model)):
            part = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
            try:
                module.load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{path} does not fit the model: {error}") from error
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, thing in self._included.items():
            thing.load_state_dict(state["included"][name])
        if self._blocks is not None:
            self._blocks.load(state["blocks"])
        for update, saved in zip(self._gradients, state["gradients"], strict=True):
            update.load(saved)
        if self.world.size > 1:
            self._exchanger.sequence = state["sequence"]
        self._flow.steps, self._flow.warm = state["flow"]
        self._feed.load(state["data"])
        randomness.restore(state["random"])

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
            if self.world.size > 1:
                self._leave()
        finally:
            self._detach()

    def _leave(self) -> None:
        if self._blocks is not None:
            for fragment in sorted(self._blocks.turns.made):
                self._land(fragment)
        quiet = 0  # exchanges in a row to which nobody came with work before him
        while quiet < (len(self._blocks.updates) if self._ahead is not None and self._blocks is not None else 1):
            ahead = self._ahead
            met = self._join_gradients() if ahead is None else self._begin_block(leaving=True)
            assert met is not None
            meeting = met
            if any(h.kind == WARM for h in meeting.headers):
                self._take_start(meeting)
            quiet = quiet + 1 if meeting.all_leaving else 0
        ahead = self._ahead
        if ahead is not None:
            export.settle(ahead.global_lanes)
        else:
            self._even_out(meeting, self._start_parts())
        self._compare(ahead.checksum() if ahead is not None else self._gradients[-1].checksum())

    def _compare(self, checksum: int) -> None:
        """A last header that nobody follows up: whether all workers end with the same bits."""
        header = replace(self._bare_header(0, leaving=True), checksum=checksum)
        self._exchanger.meet(header, _nothing)

    def _start_parts(self) -> list[Fragment]:
        parameters = [pair for _, named in self._owned for pair in named]
        return fragments("parameters", parameters) + fragments("buffers", averaged_buffers(self._model))

    def _bare_header(self, kind: int, leaving: bool) -> Header:
        """A header without a payload behind it."""
        return Header(0, kind, False, leaving, True, 0, 0, 0.0, self._flow.steps, 0)

    def _join_gradients(self) -> Meeting:
        """Come to an exchange of gradients with nothing in hand."""
        opening = self._exchanger.open(self._bare_header(0, leaving=True))
        meeting = opening.meeting()
        if meeting.empty:
            return meeting
        kind = next(h.kind for h in meeting.headers if h.brings)
        return self._gradients[kind - 1].join(opening)

    def _even_out(self, meeting: Meeting, parts: list[Fragment]) -> None:
        """Workers that made fewer steps take what one has that made the most."""
        totals = [h.total for h in meeting.headers]
        if len(set(totals)) > 1:
            checks.broadcast_start(self._transport, parts, totals.index(max(totals)))

    def _detach(self) -> None:
        """Unhook and let the connection go, without a word to the others."""
        self._closed = True
        self._forget()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            setattr(optimizer, checks.MARK, None)
        self._stop_gradients()
        if self.world.size > 1:
            self._exchanger.close()
        self._watch.close(self.blocks)
        self._transport.close()

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
