# SPDX-License-Identifier: Apache-2.0
"""Builds a run in order, each part from those before it, resumes it, and closes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paceline import checkpoint, flow
from paceline.checkpoint import AutoCheckpointer, CheckpointFinder, FoundCheckpoint, new_run, reshard
from paceline.checkpoint.auto_checkpointer import CheckpointSource
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication import SoloTransport, Transport, connect
from paceline.core.flat import Modules, buffer_elements
from paceline.core.optimizer_state import Owned
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import CheckpointError, UnsupportedError
from paceline.extensions import OBSERVERS, Observer, extension
from paceline.observe.event_log import EventLog
from paceline.observe.sinks.dispatcher import Dispatcher
from paceline.rules.rule import Rule
from paceline.run import validation
from paceline.run.hooks import StepHooks
from paceline.run.mistakes import Mistakes
from paceline.run.state import RunState
from paceline.tuning.period_controller import PeriodController, period_controller_for
from paceline.tuning.request_files import RequestFiles
from paceline.tuning.rule_chooser import rule_chooser_for
from paceline.tuning.tunables import Tunables
from paceline.tuning.tuner import MeasuredChoices, Tuner
from paceline.update import server
from paceline.update.engine.agreement import frozen_keys
from paceline.update.engine.collective.engine import Engine
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.engine.settings import Settings
from paceline.update.monitor import Monitor, TrainingProgress

ENGINES: dict[str, Callable[[RunContext], EngineProtocol]] = {
    "collective": Engine,
    "server": lambda context: server.Asynchronous(context),  # imported on first use
}
"""Engine factories, by the name that a rule's schedule gives."""


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
            validation.check_swapping(rule, owned, world)
        sinks = Dispatcher(
            lambda: transport.world, lambda block: monitor.totals(block), lambda: tuner.tunables.numbers()
        )
        worker = membership.control.worker if membership is not None else world.rank
        monitor = Monitor(EventLog(settings.log, worker), transport, sinks.progress)
        loaders = LoaderRegistry(world, settings.seed, monitor.epoch, monitor.waited)
        mistakes = Mistakes(world, loaders, settings.data)
        tuner = _tuner(rule, given, owned, settings, transport, monitor, exchanges, together)
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
            engine = flow.ElasticEngine(
                context, membership, lambda keys: state.given(keys), partial(frozen_keys, model, owned)
            )
        elif exchanges:
            engine = ENGINES[chosen.schedule.engine](context)
        state = RunState(context, membership, engine, chosen)
        tuner.begin(lambda: (engine.exchanged if engine is not None else 0, progress.steps))
        checkpointer = _checkpointer(context, membership, state) if settings.checkpoint is not None else None
        due = partial(_due_step, checkpointer, observers) if checkpointer is not None else None
        if isinstance(engine, Engine):
            _meet_after_passes(context, engine, state, checkpointer)
        loaders.begin(engine.leases if engine is not None else None, due)
        hooks = StepHooks(context, engine, mistakes, checkpointer)
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

    transport.before_calls(loaders.settle)
    loaders.meet(lambda: context.trains, pass_over)
    engine.handover.included = lambda: state.included


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
    parts.hooks.begin()
    elements = sum(p.numel() for _, named in context.owned for _, p in named)
    # a worker that joins may have taken over tuned settings
    text = context.rule.text() if parts.membership is not None else parts.state.rule_text
    context.monitor.attached(text, elements, buffer_elements(context.model))
    context.tuner.tell_rate()


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
        parts.state.complete(path, found.state, found.read_frozen)
        parts.state.load(path, found.state)
    else:
        old = OldCheckpoint(manifest, found.read_frozen)
        parts.state.load_resharded(path, old)
    context.monitor.note("resume", path=path)


def finish(parts: RunParts) -> None:
    """End the run together with all workers."""
    parts.context.loaders.leave()
    if parts.checkpointer is not None:
        parts.checkpointer.leave(parts.context.loaders.leads)
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
    owned: Owned,
    settings: Settings,
    transport: Transport,
    monitor: Monitor,
    exchanges: bool,
    together: bool,
) -> Tuner:
    """The tuner, which changes settings during the run. `model` is as the program gave it; `together`: whether several
    processes make this worker's steps together."""
    world, first, chooser, unprobed = transport.world, rule, None, ""

    def buffers() -> int:
        return buffer_elements(validation.without_ddp(model, rule, settings.group))

    def period_controller(rule: Rule) -> PeriodController | None:
        if not rule.schedule.follows_times:
            return None
        return period_controller_for(rule, transport, owned, buffers(), monitor.of_blocks)

    if rule.schedule.probe is not None and exchanges and settings.control is None and world.size > 1:
        unprobed = validation.why_unprobed(rule, model, owned, settings)
        chooser = rule_chooser_for(rule, transport, owned, buffers(), monitor.spent, not unprobed)
        first = chooser.rule if chooser is not None else rule
    workers = len(set(world.hosts)) if first.settings.within else world.size
    tunables = Tunables([optimizer for optimizer, _ in owned], first, workers, together)
    measured = MeasuredChoices(tunables, chooser, unprobed, period_controller)
    if exchanges:
        measured.begin()
    each = world.size > 1 and not first.schedule.workers_meet
    return Tuner(tunables, world, RequestFiles(settings.log, each), monitor.note, each, measured)


def _checkpointer(context: RunContext, membership: flow.ElasticMembership | None, state: RunState) -> AutoCheckpointer:
    """The auto-checkpointer, which writes into the store that the settings name."""
    settings, world = context.settings, context.transport.world
    assert settings.checkpoint is not None
    if world.size > 1 and not context.rule.schedule.workers_meet:
        raise UnsupportedError(
            world.sign(
                f"checkpoint= takes steps where all workers stand alike, and under {context.rule.text()} they never "
                "do; call run.save(path) where they meet, such as after each epoch"
            )
        )
    store = checkpoint.store_for(settings.checkpoint)
    # all members of an elastic run hold the same state, and may leave while others wait: the first of them writes
    among, run = (context.transport, new_run()) if membership is None else (SoloTransport(), membership.control.run)
    source = CheckpointSource(state.exchange_position, state.about, state.kept)
    checkpointer = AutoCheckpointer(
        store, settings.every_blocks, settings.keep, among, source, context.monitor.note, run
    )
    if isinstance(state.engine, flow.ElasticEngine):
        leaving = state.engine.leaving
        leaving.finish = flow.save_while_paused(state.engine.membership, context.monitor, checkpointer.now)
        leaving.save = partial(checkpointer.now, wait=True)
    return checkpointer
