# SPDX-License-Identifier: Apache-2.0
"""Builds a run in order, each part from those before it, resumes it, and closes it; and the state of one worker:
captured for a checkpoint, and restored from its own, from one of another number of workers, or, in an elastic run, from
what a live worker sent to this one, which joins."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline import checkpoint, flow
from paceline.checkpoint import (
    AutoCheckpointer,
    CheckpointFinder,
    ExchangePosition,
    FoundCheckpoint,
    all_well,
    new_run,
    reshard,
)
from paceline.checkpoint.auto_checkpointer import CheckpointSource, Kept
from paceline.checkpoint.files import Read, complete, without
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication import SoloTransport, Transport, connect
from paceline.core import rng
from paceline.core.flat import Modules, buffer_elements, module_list
from paceline.core.optimizer_state import Owned
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import CheckpointError, UnsupportedError
from paceline.extensions import OBSERVERS, Observer, extension
from paceline.observe.event_log import EventLog
from paceline.observe.sinks.dispatcher import Dispatcher
from paceline.rules.rule import Rule
from paceline.run import validation
from paceline.run.hooks import Mistakes, StepHooks
from paceline.tuning.request_files import RequestFiles
from paceline.tuning.rule_chooser import Measures, RuleChooser, kind_of
from paceline.tuning.tunables import Tunables
from paceline.tuning.tuner import MeasuredChoices, Tuner
from paceline.update import few_blocks, server
from paceline.update.engine import global_model
from paceline.update.engine.agreement import frozen_keys
from paceline.update.engine.blocks.model import FragmentedModel
from paceline.update.engine.collective.engine import Engine
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol, GlobalModel
from paceline.update.engine.settings import Settings
from paceline.update.monitor import Monitor, TrainingProgress

MOMENTS = (
    "block momentum of bmuf comes on top of {}'s own moments and takes it too far, most where blocks are short; take "
    "bmuf_adam, auto or averaging"
)


class RunState:
    """The state of one worker; `membership` is that of an elastic run, and `engine` is None with one worker."""

    def __init__(
        self, context: RunContext, membership: flow.ElasticMembership | None, engine: EngineProtocol | None, rule: Rule
    ) -> None:
        self._context, self._membership, self.engine = context, membership, engine
        self.included: dict[str, Any] = {}  # objects that `run.include` named
        self.pending: dict[str, Any] = {}  # states that live workers sent, for objects that it has not named yet
        self.before_capture: Callable[[], None] = lambda: None
        self.rule_text = rule.text()  # as attached; the state holds later tuning
        # of the large tensors that no exchange changes, when the training began: while a key is the same, the steps
        # name its tensor; None where no steps are taken
        self.first_keys: dict[str, str] | None = None

    def include(self, objects: dict[str, Any]) -> None:
        """Add objects with a `state_dict` and a `load_state_dict`; refuse others."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                kind = type(thing).__name__
                raise UnsupportedError(f"{name} is a {kind}, which has no state_dict and load_state_dict")
            self.included[name] = thing
            if name in self.pending:
                thing.load_state_dict(self.pending.pop(name))

    @property
    def blocks(self) -> FragmentedModel | None:
        """The engine's blocks, if it exchanges blocks."""
        return getattr(self.engine, "blocks", None)

    @property
    def global_model(self) -> GlobalModel | None:
        """Gives the global model; None if the user's model holds it."""
        return self.engine.global_model if self.engine is not None else None

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> parameter or buffer of the global model, if the user's model differs from it; copies."""
        return global_model.global_tensors(self.global_model.global_parts) if self.global_model is not None else {}

    def global_state(self) -> dict[str, Tensor]:
        """The global model as a state dictionary of the unwrapped model; copies."""
        return global_model.global_state(self._context.model, self.global_tensors())

    def global_parts(self) -> dict[str, Tensor]:
        """The same; what the user's model holds is not copied."""
        return global_model.global_parts(self._context.model, self.global_tensors())

    # -- frozen tensors ---------------------------------------------------------------------------

    def frozen_keys(self) -> dict[str, str]:
        """Name -> present key of each large tensor that no exchange changes."""
        return frozen_keys(self._context.model, self._context.owned)

    def watch_frozen(self) -> None:
        """The training begins: from now on steps name the large tensors that stay as they are."""
        self.first_keys = self.frozen_keys()

    def _naming(self, keys: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """This worker's state without these frozen tensors, which it names; and the names that it lacks."""
        state = self.capture()
        state["model"], tied = without(state["model"], keys)
        keys = {name: one for name, one in keys.items() if name not in tied}
        state |= {name: some for name, some in (("frozen", keys), ("tied", tied)) if some}
        return state, keys | {name: keys[first] for name, first in tied.items() if first in keys}

    # -- capture ----------------------------------------------------------------------------------

    def exchange_position(self) -> ExchangePosition:
        """Position in the exchanges; a single worker counts those that it would have made."""
        position = self.engine.exchange_position if self.engine is not None else None
        if position is None:
            return ExchangePosition(self._context.progress.exchanges)
        return replace(position, awaited=position.awaited or self._context.loaders.others_wait)

    def about(self) -> dict[str, Any]:
        """The manifest's fields besides checksums."""
        steps = self._context.progress.steps if self._membership is None else self._membership.applied
        blocks = self.engine.exchanged if self.engine is not None else 0
        kinds = [type(optimizer).__name__ for optimizer, _ in self._context.owned]
        return {"rule": self.rule_text, "minibatches": steps, "blocks": blocks, "optimizers": kinds}

    def kept(self) -> Kept:
        """The state and the global model for a step, without copies."""
        first = self.first_keys
        keys = {name: one for name, one in self.frozen_keys().items() if first.get(name) == one} if first else {}
        state, left = self._naming(keys)
        model = self.global_parts()
        held = {one: (name, model[name]) for name, one in state.get("frozen", {}).items()}
        return Kept(state, {name: tensor for name, tensor in model.items() if name not in left}, held)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state and the global model for a checkpoint by itself, whose global model has what all workers share.

        Every worker calls it at the same place; nothing is copied.
        """
        keys = self.frozen_keys()
        told = self._context.transport.gather_json(keys) if keys else []
        state, _ = self._naming({n: one for n, one in keys.items() if all(other.get(n) == one for other in told)})
        return state, self.global_parts()

    def given(self, keys: dict[str, str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state and the global model for joining workers that hold the tensors of these keys; no copies."""
        state, left = self._naming(keys)
        del state["model"]  # they take the global one
        left |= state.get("tied", {})
        return state, {name: tensor for name, tensor in self.global_parts().items() if name not in left}

    def capture(self) -> dict[str, Any]:
        """This worker's state, without copies."""
        self.before_capture()
        context = self._context
        return {
            "model": global_model.plain_state(context.model),
            "optimizers": [optimizer.state_dict() for optimizer, _ in context.owned],
            "included": {name: thing.state_dict() for name, thing in self.included.items()},
            "exchange": self.engine.state() if self.engine is not None else {},
            "tuning": context.tuner.state(),
            "flow": [context.progress.steps, context.progress.warm],
            "data": context.loaders.state(),
            "random": rng.capture(),
        }

    def snapshot(self) -> dict[str, Any]:
        """A copy of the state in memory; refused in the warm-up of a block rule, and under asynchronous rules."""
        world, rule = self._context.transport.world, self._context.rule
        if world.size > 1 and not rule.schedule.can_go_back(self._context.progress.warm):
            text = f"{rule.text()} cannot go back to a state in memory in a warm-up, or where workers exchange alone"
            raise UnsupportedError(world.sign(text))
        return copy.deepcopy(self.capture())

    # -- restore ----------------------------------------------------------------------------------

    def restore(self, snapshot: Any) -> None:
        """Go back to a `snapshot`; gradients are dropped."""
        if not isinstance(snapshot, dict):
            raise UnsupportedError(f"restore takes what run.snapshot() gave, got a {type(snapshot).__name__}")
        self.capture()  # ends pending exchanges
        self.load("the snapshot", copy.deepcopy(snapshot))
        for optimizer, _ in self._context.owned:
            optimizer.zero_grad(set_to_none=True)

    def load(self, path: str | Path, state: dict[str, Any], read: Read | None = None) -> None:
        """Load the state that the same number of workers saved at `path`; `read` reads the frozen tensors that it names
        where the program's own are others."""
        context, problem = self._context, ""
        if read is not None:
            try:
                complete(state["model"], state, global_model.plain_state(context.model), read)
            except CheckpointError as error:
                problem = str(error)
            all_well(context.transport, problem, f"{path} cannot be resumed")
        self.check_included(path, state["included"])
        self.check(state)
        flow.refuse_waiting(state["exchange"].get("growth"), context.transport.world.size)
        self.put(path, state)
        context.tuner.load(state["tuning"])
        if self.engine is not None:
            self.engine.follow(context.rule)
            self.engine.load(state["exchange"])
        context.loaders.load(state["data"])
        for observer in context.observers:
            observer.load(context, self.engine)
        context.transport.barrier()  # no worker asks for data before the ledger is loaded
        rng.restore(state["random"])

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the state of another model or of other optimizers."""
        reshard.check_model(global_model.plain_state(self._context.model), state["model"])
        reshard.check_optimizers([optimizer for optimizer, _ in self._context.owned], state["optimizers"])

    def check_included(self, path: str | Path, saved: Iterable[str]) -> None:
        """Refuse a checkpoint with other included objects than this run's."""
        missing = sorted(set(saved) ^ set(self.included))
        if missing:
            raise CheckpointError(
                f"{path} and this run do not include the same objects: {', '.join(missing)} stand in one of them only; "
                "pass the same names to save and resume"
            )

    def put(self, path: str | Path, state: dict[str, Any]) -> None:
        """Load model, optimizers, included objects and the count of steps."""
        context = self._context
        for prefix, module in module_list(global_model.unwrapped(context.model)):
            part = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
            try:
                module.load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{path} does not fit the model: {error}") from error
        for (optimizer, _), saved in zip(context.owned, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in self.included.keys() & state["included"].keys():
            self.included[name].load_state_dict(state["included"][name])
        context.progress.restore(*state["flow"])
        if self.first_keys is not None:
            self.watch_frozen()

    # -- other workers' states ----------------------------------------------------------------------

    def load_resharded(self, path: str | Path, old: OldCheckpoint) -> None:
        """Resume from a checkpoint of another number of workers.

        Reads and checks everything first; changes this run only after all workers have done so.
        """
        context, problem, loaded, put = self._context, "", {}, None
        try:
            self.check_included(path, old.keys(0, "included"))
            loaded = self._read(old)
            put = self.engine.reshard(old) if self.engine is not None else None
        except (OSError, ValueError, SafetensorError) as error:  # reported to all workers below
            problem = str(error)
        all_well(context.transport, problem, f"{path} cannot be resumed")
        context.loaders.regroup(loaded["data"])  # first, because it may raise
        self.put(path, loaded)
        context.tuner.load(loaded["tuning"], asked=False)
        if put is not None and self.engine is not None:
            self.engine.follow(context.rule)
            put()
        for observer in context.observers:
            observer.load(context, self.engine)
        context.transport.barrier()
        rng.restore(loaded["random"])

    def _read(self, old: OldCheckpoint) -> dict[str, Any]:
        """This worker's initial state without the engine's; checked against its model and optimizers."""
        context, model = self._context, old.model()
        own = global_model.plain_state(context.model)
        complete(model, {name: old.part(0, name) for name in ("frozen", "tied")}, own, old.read_frozen)
        found = {
            "model": model,
            "optimizers": self._optimizers(old),
            "included": old.part(0, "included"),
            "flow": old.part(0, "flow"),
            "tuning": old.part(0, "tuning"),
            "data": [old.part(rank, "data") for rank in range(old.size)],
            "random": reshard.random_state(old, context.transport.world.rank, context.settings.seed),
        }
        self.check(found)
        flow.refuse_waiting(old.part(0, "exchange", "growth"), old.size)
        return found

    def _optimizers(self, old: OldCheckpoint) -> list[dict[str, Any]]:
        """State dictionaries for the optimizers: the mean of the workers', or rank 0's if all were equal."""
        context = self._context
        at_owners = context.rule.steps_at_owners
        if at_owners and self.engine is None:
            return server.whole_optimizers(old, context.model, context.owned, context.rule.sharded)
        apart = not at_owners and not context.rule.schedule.is_lockstep(bool(old.part(0, "flow", 1)))
        if self.blocks is not None and not self.blocks.keeps_state:
            apart = False  # each block starts with fresh optimizer state
        found: list[dict[str, Any]] = reshard.mean_optimizers(old) if apart else old.part(0, "optimizers")
        return found

    def take_over(self, elastic: flow.ElasticEngine, checkpointer: AutoCheckpointer | None) -> None:
        """Load the state that a live worker sent, and any state sent later, when the members change."""
        context = self._context

        def load(given: flow.GivenState) -> None:
            loaded = self._read(given)
            put = elastic.reshard(given)
            context.loaders.follow(loaded["data"][0])
            self.pending = {name: part for name, part in loaded["included"].items() if name not in self.included}
            self.put("the state that a living worker sent", loaded)
            context.tuner.load(loaded["tuning"], asked=False)
            elastic.follow(context.rule)
            put()
            rng.restore(loaded["random"])
            if checkpointer is not None:
                checkpointer.follow()

        elastic.joining.take_given(load)


@dataclass(frozen=True)
class RunParts:
    """The parts of a run. `membership` is that of an elastic run, else None; the engine, which exchanges by the rule,
    is None with one worker, unless the rule has blocks for it (`alone`)."""

    context: RunContext
    membership: flow.ElasticMembership | None
    state: RunState
    engine: EngineProtocol | None
    mistakes: Mistakes
    sinks: Dispatcher
    checkpointer: AutoCheckpointer | None
    hooks: StepHooks

    @property
    def blocks(self) -> int:
        """Blocks that have been exchanged, or this worker's pushes."""
        return self.engine.exchanged if self.engine is not None else 0

    @property
    def elastic(self) -> flow.ElasticEngine | None:
        """The engine of an elastic run, else None."""
        return self.engine if isinstance(self.engine, flow.ElasticEngine) else None

    @property
    def left(self) -> bool:
        """Whether this worker has left an elastic run before its end."""
        return self.elastic is not None and self.elastic.leaving.gone


def assemble(model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> RunParts:
    """Check the user's arguments, and build a run; nothing is hooked yet."""
    given, model = model, validation.without_ddp(model, rule, settings.group)
    owned, sharded = validation.check_arguments(model, optimizer, rule, settings)
    transport, membership = _connect(rule, model, owned, settings)
    world = transport.world
    with contextlib.ExitStack() as on_error:
        on_error.callback((membership or transport).close)
        exchanges = rule.exchanges_among(world.size) or membership is not None
        together = world.size > 1 and (bool(sharded) or isinstance(given, DistributedDataParallel))
        if together:
            validation.check_together(rule, settings, sharded, world)
        if exchanges:
            rule.check_swapping([optimizer for optimizer, _ in owned], world)
        sinks = Dispatcher(
            lambda: transport.world, lambda block: monitor.totals(block), lambda: tuner.tunables.numbers()
        )
        worker = membership.control.worker if membership is not None else world.rank
        monitor = Monitor(EventLog(settings.log, worker), transport, sinks.progress)
        loaders = LoaderRegistry(world, settings.seed, monitor.epoch, monitor.waited)
        mistakes = Mistakes(world, loaders, settings.data)
        buffers = partial(buffer_elements, model)
        of_data = lambda: loaders.steps_of_pass, lambda: loaders.can_wait and not together, lambda: loaders.furthest
        measures = Measures(transport, owned, buffers, monitor.spent, monitor.of_blocks, *of_data, loaders.deal)
        tuner = _tuner(rule, given, settings, measures, monitor, exchanges, together)
        on_error.callback(tuner.close)
        chosen = tuner.rule  # by a probe, where the rule has one
        progress = TrainingProgress(chosen.schedule, owned)
        if exchanges and world.size > 1 and (progress.lockstep or chosen.settings.within):
            validation.check_forward(chosen, owned, model)
        observers: list[Observer] = []
        for name in settings.observers:
            observer = extension(OBSERVERS, name)(rule, settings, world, loaders, membership is not None)
            on_error.callback(observer.close)
            observers.append(observer)
        context = RunContext(settings, model, owned, transport, progress, monitor, loaders, tuner, observers)

        engine: EngineProtocol | None = None
        if membership is not None:
            # the engine sends the state of which it is a part
            frozen = partial(frozen_keys, model, owned)
            engine = flow.ElasticEngine(context, membership, lambda keys: state.given(keys), frozen)
        elif exchanges:
            # the server's module is imported on its first use
            if chosen.schedule.engine == "collective":
                engine = Engine(context, lambda: state.included)
            else:
                engine = server.Asynchronous(context)
        state = RunState(context, membership, engine, chosen)
        follow = engine.retuned if engine is not None else None
        tuner.begin(lambda: (engine.exchanged if engine is not None else 0, progress.steps), follow)
        checkpointer = _checkpointer(context, membership, state) if settings.checkpoint is not None else None
        due = partial(_due_step, checkpointer, observers) if checkpointer is not None else None
        hooks = StepHooks(context, engine, mistakes, checkpointer)
        if isinstance(engine, Engine):
            _meet_after_passes(context, engine, state, checkpointer)
        few = partial(few_blocks.before, chosen, world.size)
        leases, led = engine.leases if engine is not None else None, lambda steps: mistakes.warn("blocks", few(steps))
        loaders.begin(leases, due, hooks.pass_over, mistakes.warn, mistakes.on_empty_pass, led)
        on_error.pop_all()
    return RunParts(context, membership, state, engine, mistakes, sinks, checkpointer, hooks)


def _connect(
    rule: Rule, model: Modules, owned: Owned, settings: Settings
) -> tuple[Transport, flow.ElasticMembership | None]:
    """Connect to the other workers; with a membership if the run is elastic."""
    if settings.control is None:
        return connect(settings.timeout_s, settings.group, settings.transport, settings.tls), None
    flow.check_rule(rule)
    grow = rule.schedule.grow
    first = grow.first if grow is not None else 0
    membership = flow.join(flow.fingerprint(rule, model, owned, settings), settings, first)
    return membership.transport, membership


def _due_step(checkpointer: AutoCheckpointer, observers: Sequence[Observer]) -> Callable[[], None] | None:
    """A function that takes the checkpoint step that is due, and tells the observers; None if none is."""
    take = checkpointer.at_iteration_end()
    if take is None or not observers:
        return take

    def taken() -> None:
        take()
        for observer in observers:
            observer.saved()

    return taken


def _meet_after_passes(
    context: RunContext, engine: Engine, state: RunState, checkpointer: AutoCheckpointer | None
) -> None:
    """Let the workers meet at the end of each pass."""
    loaders, transport = context.loaders, context.transport

    def pass_over() -> None:
        engine.end_pass()
        loaders.entered(engine.steps_committed)  # this worker has joined an exchange while it stood
        if checkpointer is not None:
            checkpointer.passed()

    transport.before_calls(loaders.called)
    loaders.meet(lambda: context.trains, pass_over)


def start(parts: RunParts, run: Any) -> None:
    """Hook the optimizers of `run`, load the state that live workers sent, and write the first event."""
    context, elastic = parts.context, parts.elastic
    parts.hooks.install(run)
    for observer in context.observers:
        observer.begin(context, parts.engine, parts.checkpointer, run.close)
    if elastic is not None:
        parts.state.take_over(elastic, parts.checkpointer)
    if parts.checkpointer is not None:
        parts.state.watch_frozen()
    parts.hooks.pass_over()
    elements = sum(p.numel() for _, named in context.owned for _, p in named)
    # a worker that joins may have taken over tuned settings
    text = context.rule.text() if parts.membership is not None else parts.state.rule_text
    context.monitor.attached(text, elements, buffer_elements(context.model))
    context.tuner.note_rate()
    adaptive = [type(one).__name__ for one, _ in context.owned if "betas" in one.defaults]
    if adaptive and context.rule.name == "bmuf" and context.transport.world.size > 1:
        parts.mistakes.warn("moments", MOMENTS.format(adaptive[0]))


def resume_run(parts: RunParts, path: str | Path | None) -> bool:
    """Load the checkpoint at `path`, or the newest step in the run's store; returns whether there was one."""

    def once() -> bool:
        settings = parts.context.settings
        named = None if settings.round is not None and settings.start is not None else path
        with CheckpointFinder(named, settings.checkpoint, parts.context.transport, settings.start) as finder:
            found = finder.found()
            for why in found.damaged.values():
                parts.context.monitor.damaged(why)
            if found.manifest:
                _load(parts, found)
            if parts.checkpointer is not None:
                parts.checkpointer.resumed(*finder.own_steps(found))
        for observer in parts.context.observers:
            observer.resumed()
        return bool(found.manifest)

    return parts.elastic.joining.resume(once) if parts.elastic is not None else once()


def _load(parts: RunParts, found: FoundCheckpoint) -> None:
    """Load a checkpoint: bit for bit if the same number of workers saved it, else resharded."""
    context, manifest, path = parts.context, found.manifest, found.name
    if manifest["rule"] != parts.state.rule_text:
        raise CheckpointError(
            f"{path} was made under the rule {manifest['rule']}, and this run has {parts.state.rule_text}; "
            "use the same rule, or begin a new run from its global model"
        )
    reshard.check_kinds(path, [optimizer for optimizer, _ in context.owned], manifest.get("optimizers"))
    if found.state is not None and parts.membership is None:
        parts.state.load(path, found.state, found.read_frozen)
    else:
        old = OldCheckpoint(manifest, found.read_frozen)
        parts.state.load_resharded(path, old)
    context.monitor.note("resume", path=path)


def finish(parts: RunParts) -> None:
    """End the run together with all workers."""
    parts.context.loaders.leave()
    if parts.checkpointer is not None:
        shared = parts.context.loaders.leads or parts.context.settings.data == "split"
        parts.checkpointer.leave(shared, parts.context.settings.data == "split")
    parts.hooks.finish()
    if parts.engine is not None:
        parts.engine.shutdown()
    if isinstance(parts.engine, Engine) and parts.context.transport.world.size > 1:
        parts.context.loaders.close()
        parts.context.loaders.compare_wholes(parts.context.transport.meet)
    for observer in parts.context.observers:
        observer.end()
    if parts.checkpointer is not None:
        parts.checkpointer.finish(complain=True)
    parts.mistakes.close()


def take_apart(parts: RunParts) -> None:
    """Unhook the optimizers and close the connection, without notifying other workers."""
    context, checkpointer = parts.context, parts.checkpointer
    parts.hooks.remove()
    context.loaders.close()
    if parts.left and parts.elastic is not None:
        parts.elastic.leaving.finish()
    context.tuner.close()
    if checkpointer is not None:
        checkpointer.close()
    for observer in context.observers:
        observer.close()
    if parts.engine is not None:
        parts.engine.close()
    context.transport.close()
    if checkpointer is not None:
        checkpointer.finish()  # a single worker finishes its pending write; peers see the closed connection
    context.monitor.close(parts.blocks)
    parts.sinks.close()


def _tuner(
    rule: Rule,
    model: Modules,
    settings: Settings,
    measures: Measures,
    monitor: Monitor,
    exchanges: bool,
    together: bool,
) -> Tuner:
    """The tuner, which changes settings during the run. `model` is as the program gave it; `together`: whether several
    processes make this worker's steps together."""
    world, owned, probe = measures.transport.world, measures.owned, rule.schedule.probe
    first, chooser = rule, None
    if probe is not None and exchanges and settings.control is None and world.size > 1:
        chooser = RuleChooser(rule, measures, settings.log, validation.why_unprobed(rule, model, owned, settings))
        first = chooser.rule
    workers = len(set(world.hosts)) if first.settings.within else world.size
    tunables = Tunables([optimizer for optimizer, _ in owned], first, workers, together)
    controller = partial(measures.controller, overlaps=probe is not None and probe.overlap)
    kind = kind_of(rule, owned) if rule.name == "auto" else ""
    uneven = exchanges and world.size > 1 and settings.control is None and not together and not rule.settings.even
    speeds = measures.speeds() if uneven else None
    measured = MeasuredChoices(tunables, chooser, controller, kind, speeds)
    if exchanges:
        measured.use(first)
    each = world.size > 1 and not first.schedule.workers_meet
    return Tuner(measured, world, RequestFiles(settings.log, each), monitor.note)


def _checkpointer(context: RunContext, membership: flow.ElasticMembership | None, state: RunState) -> AutoCheckpointer:
    """The auto-checkpointer, which writes into the store that the settings name."""
    settings, world = context.settings, context.transport.world
    assert settings.checkpoint is not None
    if world.size > 1 and not context.rule.schedule.workers_meet:
        text = f"under {context.rule.text()} workers never stand alike, as the steps of checkpoint= need"
        raise UnsupportedError(world.sign(f"{text}; call run.save(path) where they meet, such as after each epoch"))
    store = checkpoint.store_for(settings.checkpoint)
    # all members of an elastic run hold the same state, and may leave while others wait: the first of them writes
    among, run = (context.transport, new_run()) if membership is None else (SoloTransport(), membership.control.run)
    source = CheckpointSource(state.exchange_position, state.about, state.kept)
    checkpointer = AutoCheckpointer(
        store, settings.every_blocks, settings.keep, among, source, context.monitor.note, run
    )
    if isinstance(state.engine, flow.ElasticEngine):
        finish = flow.save_while_paused(state.engine.membership, context.monitor, checkpointer.now)
        state.engine.leaving.saves(partial(checkpointer.now, wait=True), finish)
    return checkpointer
