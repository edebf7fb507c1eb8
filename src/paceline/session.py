# SPDX-License-Identifier: Apache-2.0
"""The face: a `Run` hooks the optimizer's step and is what the user holds. Made by :func:`paceline.attach`."""

from __future__ import annotations

import contextlib
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
from paceline.data import Feed, Share
from paceline.errors import CheckpointError, ClosedError, NonFiniteError, UnsupportedError
from paceline.exchange import Chunk, Exchanger, Header, Meeting
from paceline.flow import Flow
from paceline.fragments import Fragment, Modules, averaged_buffers, fragments, module_list
from paceline.gradient_update import GradientUpdate
from paceline.journal import Journal
from paceline.rule import Rule, is_block
from paceline.settings import Settings
from paceline.transport import Transport, connect
from paceline.update import BlockUpdate, Work
from paceline.watch import Watch

WARM = -1
"""Kind of the exchange that ends a warm-up."""


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
        self._closed = False
        self._handles: list[Any] = []
        self._flow = Flow(rule.schedule)
        self._included: dict[str, Any] = {}
        self._scaler_hook: ScalerHook | None = None
        self._block: BlockUpdate | None = None
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
        self._exchanger = Exchanger(self._transport, self.rule.codec, self.rule.topology.wire(self._transport))
        if is_block(self.rule):
            device = torch.device("cpu") if self._settings.outer_state == "host" else None
            self._block = BlockUpdate(self.rule, self._exchanger, self._model, self._owned, device)
            moments = [lane.fragment for lane in self._block.moment_lanes or []]
            checks.broadcast_start(self._transport, moments)
            self._block.capture_moments()
        if self._flow.lockstep:
            last = len(self._owned) - 1
            self._gradients = [
                GradientUpdate(self.rule, self._exchanger, 1 + number, named, self._model if number == last else None)
                for number, (_, named) in enumerate(self._owned)
            ]
            if self._settings.scaler is not None:
                hook = ScalerHook(self._settings.scaler, self._exchange_gradients, self._gradients_due)
                self._scaler_hook = hook

    def _hook(self) -> None:
        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._after_step(optimizer)

        for optimizer in self._optimizers:
            setattr(optimizer, checks.MARK, self)
            if self._gradients:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(after))

    # -- inside optimizer.step() ------------------------------------------------------------------

    def _gradients_due(self, optimizer: Optimizer) -> bool:
        ours = any(optimizer is one for one in self._optimizers)
        return ours and self._flow.lockstep and not self._closed

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._gradients_due(optimizer):
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
        if self._scaler_hook is None and self._flow.steps == 0:
            checks.refuse_hidden_scaler()
        self._exchange_gradients(optimizer)

    def _exchange_gradients(self, optimizer: Optimizer) -> None:
        checks.check_unchanged(self._owned)
        number = next(k for k, one in enumerate(self._optimizers) if one is optimizer)
        self._watch.begin()
        try:
            work = Work(1, self._flow.steps, self._feed.factor)
            meeting = self._gradients[number].exchange(work)
        except NonFiniteError:
            if self._scaler_hook is None:
                raise
            meeting = None  # all overflowed: the scaler finds it on every worker, and all skip
        self._watch.end(self._exchanger.timing, meeting, block=0, warmup=is_block(self.rule))

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._closed or optimizer is not self._optimizers[-1] or skipped(optimizer):
            return
        due = self._flow.stepped()
        new = self._feed.stepped()
        self._watch.stepped(self._flow.steps, self._feed.samples, new)
        if self.world.size == 1:
            return
        if due == "block":
            self._exchange_block(leaving=False)
        elif due == "warm":
            self._end_warmup()

    def _end_warmup(self) -> None:
        """The synchronous steps are over: everybody, those too who have left, takes the same start."""
        self._take_start(self._exchanger.meet(self._bare_header(WARM, leaving=False), _nothing))

    def _take_start(self, meeting: Meeting) -> None:
        assert self._block is not None
        self._flow.warm = True
        self._block.prepare()
        self._even_out(meeting, [lane.fragment for lane in self._block.lanes])
        self._block.capture()
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
            self._scaler_hook = None

    def _exchange_block(self, leaving: bool) -> Meeting:
        assert self._block is not None
        if not leaving:  # a run that was told to close must be able to: with what it owned at attach
            checks.check_unchanged(self._owned)
        self._watch.begin()
        work = Work(self._flow.since, self._flow.steps, leaving=leaving)
        self._flow.since = 0
        meeting = self._block.exchange(work)
        self._watch.end(self._exchanger.timing, meeting, block=self._block.block, warmup=False)
        return meeting

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
        return self._block.block if self._block is not None else 0

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
    def _ahead(self) -> BlockUpdate | None:
        """The block update, where the user's model differs from the global one."""
        return None if self._flow.lockstep or self._closed else self._block

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
        block = self._block
        return {
            "model": export.plain_state(self._model),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "included": {name: thing.state_dict() for name, thing in self._included.items()},
            "outer": block.state() if block is not None else {},
            "numbers": block.numbers() if block is not None else {},
            "sequence": self._exchanger.sequence if self.world.size > 1 else 0,
            "flow": [self._flow.steps, self._flow.since, self._flow.warm],
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
        if self._block is not None:
            self._block.load(state["outer"], state["numbers"])
        if self.world.size > 1:
            self._exchanger.sequence = state["sequence"]
        self._flow.steps, self._flow.since, self._flow.warm = state["flow"]
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
        while True:
            ahead = self._ahead
            meeting = self._join_gradients() if ahead is None else self._exchange_block(leaving=True)
            if any(h.kind == WARM for h in meeting.headers):
                self._take_start(meeting)
            if meeting.all_leaving:
                break
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
        steps, number = self._flow.steps, self._exchanger.sequence + 1
        return Header(number, kind, False, leaving, True, 0, 0, 0.0, steps, 0)

    def _join_gradients(self) -> Meeting:
        """Come to an exchange of gradients with nothing in hand."""
        header = self._bare_header(0, leaving=True)
        meeting = self._exchanger.meet(header, lambda kind: self._gradients[kind - 1].chunks())
        if not meeting.empty:
            kind = next(h.kind for h in meeting.headers if h.brings)
            self._gradients[kind - 1].join_empty(meeting)
        return meeting

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
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
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
