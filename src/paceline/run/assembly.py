# SPDX-License-Identifier: Apache-2.0
"""Builds a run from its parts, resumes it, and closes it.

The order matters: each part needs those built before it. `RunParts` lists them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline import checkpoint, flow
from paceline.checkpoint import AutoCheckpointer, CheckpointFinder, FoundCheckpoint, new_run, reshard
from paceline.checkpoint.auto_checkpointer import CheckpointSource
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication import SoloTransport, Transport
from paceline.core.flat import Modules, averaged_buffers, other_buffers
from paceline.core.optimizer_state import Owned
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import CheckpointError, UnsupportedError
from paceline.extensions import OBSERVERS, Observer, extension
from paceline.observe.event_log import EventLog
from paceline.observe.sinks.dispatcher import Dispatcher
from paceline.rules.rule import Rule
from paceline.run import other_workers, validation
from paceline.run.hooks import StepHooks
from paceline.run.mistakes import Mistakes
from paceline.run.other_workers import connect_all, take_over_state
from paceline.run.state import RunState
from paceline.tuning.period_controller import period_controller_for
from paceline.tuning.request_files import RequestFiles
from paceline.tuning.rule_chooser import rule_chooser_for
from paceline.tuning.tunables import Tunables
from paceline.tuning.tuner import MeasuredChoices, Tuner
from paceline.update import server
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
    """The parts of a run.

    Attributes:
        context: what the parts share: model, optimizers, connection, counters, data, tuner.
        membership: of an elastic run, else None.
        state: what a checkpoint holds.
        engine: exchanges by the rule; None with one worker, unless the rule has blocks for it (`alone`).
        elastic: the engine of an elastic run, else None.
        mistakes: warns of common mistakes of the program.
        sinks: receive the run's logged values.
        checkpointer: keeps the run's steps, or None.
        hooks: the hooks of `optimizer.step()`.
    """

    context: RunContext
    membership: flow.ElasticMembership | None
    state: RunState
    engine: EngineProtocol | None
    elastic: flow.ElasticEngine | None
    mistakes: Mistakes
    sinks: Dispatcher
    checkpointer: AutoCheckpointer | None
    hooks: StepHooks

    @property
    def blocks(self) -> int:
        """Blocks that have been exchanged, or this worker's pushes."""
        return self.engine.exchanged if self.engine is not None else 0

    @property
    def left(self) -> bool:
        """Whether this worker has left an elastic run before its end."""
        return self.elastic is not None and self.elastic.leaving.gone


def assemble(model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> RunParts:
    """Check the user's arguments, and build a run; nothing is hooked yet."""
    given, model = model, validation.without_ddp(model, rule, settings.group)
    owned = validation.check_arguments(model, optimizer, rule, settings)
    transport, membership = connect_all(rule, model, owned, settings)
    with contextlib.ExitStack() as on_error:
        on_error.callback((membership or transport).close)
        exchanges = rule.exchanges_among(transport.world.size) or membership is not None
        validation.check_together(rule, settings, given, transport.world)
        if exchanges:
            validation.check_swapping(rule, owned, transport.world)

        sinks = Dispatcher(
            lambda: transport.world, lambda block: monitor.totals(block), lambda: tuner.tunables.numbers()
        )
        worker = membership.control.worker if membership is not None else transport.world.rank
        monitor = Monitor(EventLog(settings.log, worker), transport, sinks.progress)
        loaders = LoaderRegistry(transport.world, settings.seed, monitor.epoch, monitor.waited, monitor.shared)
        mistakes = Mistakes(transport.world, loaders, settings.data)
        tuner = _tuner(rule, given, owned, settings, transport, monitor)
        on_error.callback(tuner.close)
        progress = TrainingProgress(tuner.rule.schedule, owned)
        if exchanges and transport.world.size > 1:
            validation.check_forward(tuner.rule, progress.lockstep, owned, model)
        observers: list[Observer] = []
        for name in settings.observers:
            observer = extension(OBSERVERS, name)(rule, settings, transport.world, loaders, membership is not None)
            on_error.callback(observer.close)
            observers.append(observer)
        context = RunContext(settings, model, owned, transport, progress, monitor, loaders, tuner, observers)

        state, elastic = RunState(context, membership), None
        if membership is not None:
            elastic = flow.ElasticEngine(context, membership, state.given, state.frozen_keys)
        engine: EngineProtocol | None = elastic
        if engine is None and exchanges:
            engine = ENGINES[tuner.rule.schedule.engine](context)
        state.engine = engine
        tuner.begin(lambda: (engine.exchanged if engine is not None else 0, progress.steps))
        checkpointer = _checkpointer(context, membership, elastic, state) if settings.checkpoint is not None else None
        due = partial(_due_step, checkpointer, observers) if checkpointer is not None else None
        loaders.begin(engine.leases if engine is not None else None, due)
        if isinstance(engine, Engine):
            _meet_after_passes(context, engine, state, partial(_joined, context, engine, checkpointer))
        hooks = StepHooks(context, engine, mistakes, checkpointer)
        on_error.pop_all()
    return RunParts(context, membership, state, engine, elastic, mistakes, sinks, checkpointer, hooks)


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


def _joined(context: RunContext, engine: EngineProtocol, checkpointer: AutoCheckpointer | None) -> None:
    """This worker has joined an exchange while it stood."""
    context.loaders.entered(engine.steps_committed)
    if checkpointer is not None:
        checkpointer.passed()


def _meet_after_passes(context: RunContext, engine: Engine, state: RunState, joined: Callable[[], None]) -> None:
    """Let the workers meet at the end of each pass.

    Args:
        joined: called when this worker has joined exchanges.
    """
    loaders, transport = context.loaders, context.transport

    def pass_over() -> None:
        engine.end_pass()
        joined()

    loaders.meet(lambda: context.trains, pass_over)
    transport.before_calls(loaders.settle)
    engine.handover.included = lambda: state.included


def start(parts: RunParts, run: Any) -> None:
    """Hook the optimizers of `run`, load the state that live workers sent, and write the first event."""
    context = parts.context
    parts.hooks.install(run)
    for observer in context.observers:
        observer.begin(context, parts.engine, parts.checkpointer, run.close)
    if parts.elastic is not None:
        take_over_state(context, parts.elastic, parts.state, parts.checkpointer)
    if parts.checkpointer is not None:
        parts.state.watch_frozen()
    parts.hooks.begin()
    elements = sum(p.numel() for _, named in context.owned for _, p in named)
    context.monitor.attached(context.rule.text(), elements, _buffer_elements(context.model))
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
        other_workers.load_resharded(path, old, parts.state, context)
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
    rule: Rule, model: Modules, owned: Owned, settings: Settings, transport: Transport, monitor: Monitor
) -> Tuner:
    """The tuner, which changes settings during the run; its optimizer hooks must run first.

    Args:
        model: as the program gave it.
    """
    world, optimizers, elastic = transport.world, [optimizer for optimizer, _ in owned], settings.control is not None
    buffers, chooser, unprobed = _buffer_elements(validation.without_ddp(model, rule, settings.group)), None, ""
    exchanges = elastic or rule.exchanges_among(world.size)
    if exchanges and not elastic and world.size > 1:
        unprobed = validation.why_unprobed(rule, model, owned, settings)
        chooser = rule_chooser_for(rule, transport, owned, buffers, monitor.spent, not unprobed)
    first = chooser.rule if chooser is not None else rule
    fixed = world.size > 1 and validation.trains_together(model)
    workers = len(set(world.hosts)) if first.settings.within else world.size
    tunables = Tunables(optimizers, first, workers, fixed)
    measured = MeasuredChoices(
        tunables,
        chooser,
        unprobed if chooser is not None else "",
        lambda rule: period_controller_for(rule, transport, owned, buffers, monitor.of_blocks),
    )
    if exchanges:
        measured.begin()
    alone = world.size > 1 and not first.schedule.workers_meet
    return Tuner(tunables, world, RequestFiles(settings.log, each=alone), monitor.note, each=alone, measured=measured)


def _checkpointer(
    context: RunContext, membership: flow.ElasticMembership | None, elastic: flow.ElasticEngine | None, state: RunState
) -> AutoCheckpointer:
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
    if elastic is not None:
        elastic.leaving.finish = flow.save_while_paused(elastic.membership, context.monitor, checkpointer.now)
        elastic.leaving.save = partial(checkpointer.now, wait=True)
    return checkpointer


def _buffer_elements(model: Modules) -> int:
    return sum(buffer.numel() for _, buffer in averaged_buffers(model) + other_buffers(model))
