# SPDX-License-Identifier: Apache-2.0
"""Writes a worker's receipts: what it brought to each merge, and what it held afterwards.

Training stops for a copy into host memory; a thread hashes it with SHA-256, which releases the interpreter. The state
of a fragment is its outer state (anchor, momentum, buffers); where gradients are exchanged it is parameters and
buffers, after the step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.auto_checkpointer import Snapshot
from paceline.core.flat import Modules, averaged_buffers, local
from paceline.core.optimizer_state import Owned
from paceline.core.world import World
from paceline.data.sharing.iteration import PlaceLog
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.extensions import Observer
from paceline.observe.event_file import EventFile
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.model import FragmentedModel
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.engine.settings import Settings
from paceline.update.exchange.exchanger import ExchangeSummary
from paceline.version import __version__
from paceline_plugins.receipts import chain
from paceline_plugins.receipts.chain import canonical, chain_name, hash_of

logger = logging.getLogger("paceline")

FOLDER, UNTIL = "PACELINE_RECEIPTS", "PACELINE_RECEIPTS_UNTIL"
"""Variables: where the receipts go, and the last exchange of a run that is made again for comparison."""
NEVER = 1 << 40
"""Exchanges from one checkpoint step to the next, in a run that is made again."""
GRADIENTS = -1
"""Number of the "fragment" that is the model of rules, and warm-ups, that exchange gradients."""
SEEDS, LINES = ("PACELINE_SEED", "PYTHONHASHSEED"), "PACELINE_LINES"
"""Variables from which an unchanged program's start follows."""
State = Mapping[int, Mapping[str, Tensor]]
"""Fragment -> its state by name."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors in host memory, in their order: names, dtypes, lengths and bytes."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tensor.numel()}\n".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def plain_state(owned: Owned, model: Modules) -> dict[str, Tensor]:
    """Parameters and buffers, where gradients are exchanged."""
    parameters = {f"parameter/{name}": local(p) for _, named in owned for name, p in named}
    return parameters | {f"buffer/{name}": buffer for name, buffer in averaged_buffers(model)}


def recomputable(rule: Rule, workers: int) -> str:
    """Why exchanges that are made again may have other bits; "" if they must have the same ones."""
    if rule.schedule.probe is not None or getattr(rule.schedule, "pace", None) is not None:
        return f"{rule.text()} follows measured times; name a rule with its period, such as bmuf(period=16)"
    if workers > 2 and not getattr(rule.common, "ordered", False):  # buffers go without a codec
        return f"the order of sums of {rule.text()} follows the route; add reproducible=True"
    return ""


def refuse(rule: Rule, world: World, elastic: bool) -> None:
    """Refuse receipts where the books do not say what went into which merge."""
    refused = {
        "in an elastic run the members change, and so does the order of sums; leave --elastic out": elastic,
        "one worker merges nothing; start more, or leave receipts out": world.size == 1,
        "each worker exchanges by itself, and there is no common merge; take a rule of blocks or of steps": (
            not rule.schedule.workers_meet
        ),
        "the processes of a host are one worker; leave within out": bool(rule.settings.within),
    }
    for why, wrong in refused.items():
        if wrong:
            raise UnsupportedError(world.sign(f"no receipts can be written under {rule.text()}: {why}"))


class Receipts(Observer):
    """The chain of one worker, while it is written; an :class:`paceline.extensions.Observer`.

    Raises:
        UnsupportedError: receipts cannot be written under this rule, or the folder cannot be, or it holds the chain of
            a run of another size.
    """

    def __init__(self, rule: Rule, settings: Settings, world: World, loaders: LoaderRegistry, elastic: bool) -> None:
        refuse(rule, world, elastic)
        why = recomputable(rule, world.size)
        if why and world.rank == 0:
            logger.warning("%s", world.sign(f"a block of this run that is made again may have other bits: {why}"))
        assert settings.receipts is not None
        loaders.places = PlaceLog()
        until, folder = os.environ.get(UNTIL), Path(settings.receipts)
        self._world, self._places, self._until = world, loaders.places, int(until) if until else None
        self._context: RunContext | None = None
        self._engine: EngineProtocol | None = None
        self.reached = False  # whether the last exchange of a run that is made again is over
        self._before = self._read(folder / chain_name(world.rank))
        self._number, self._previous = self._before.count, self._before.head
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"the receipts of worker {world.rank} in {folder}"
            self._file = EventFile(lambda: _append_to(folder / chain_name(world.rank)), name)
        except OSError as error:
            raise UnsupportedError(world.sign(f"no receipts can be written in {folder}: {error}")) from error
        self._thread = ThreadPoolExecutor(1, f"paceline-receipts-{world.rank}")
        self._given: dict[int, Future[str]] = {}
        self._copies: dict[tuple[str, int], Snapshot] = {}
        self._last: Future[None] | None = None
        self._closed = False

    def _read(self, path: Path) -> chain.Chain:
        if not path.is_file():
            return chain.Chain(self._world.rank)
        try:
            _cut_half_line(path)
            before = chain.read(path, self._world.rank)
        except OSError as error:
            raise UnsupportedError(self._world.sign(f"{path} cannot be read: {error}")) from error
        if before.problems or before.start["size"] != self._world.size:
            why = before.problems[0] if before.problems else f"it is of a run of {before.start['size']} workers"
            raise UnsupportedError(
                self._world.sign(f"receipts cannot go on in {path}: {why}; give receipts another directory")
            )
        return before

    # -- what happens in the run ------------------------------------------------------------------

    @staticmethod
    def check(settings: Settings) -> Settings:
        """The settings with what the environment says; a run that is made again leaves the checkpoints alone."""
        folder = settings.receipts or os.environ.get(FOLDER) or None
        if os.environ.get(UNTIL) and os.environ.get(FOLDER):
            folder = os.environ[FOLDER]
            return replace(settings, receipts=folder, checkpoint=Path(folder) / "steps", every_blocks=NEVER)
        return replace(settings, receipts=folder)

    def begin(
        self, context: RunContext, engine: EngineProtocol | None, checkpointer: object, close: Callable[[], None]
    ) -> None:
        """The run begins."""
        self._context, self._engine = context, engine
        if engine is None:
            return
        settings = context.settings
        devices = {local(p).device.type for _, named in context.owned for _, p in named}
        job, _, authority = os.environ.get("PACELINE_RECEIPTS_AUTHORITY", "").partition(" ")
        line = {
            "kind": "start",
            "job": job,
            "authority": authority,
            "rank": self._world.rank,
            "size": self._world.size,
            "host": self._world.host,
            "settings": {
                "rule": context.rule.text(),
                "seed": settings.seed,
                "guard": str(settings.guard),
                "outer_state": settings.outer_state,
                "environment": seeds(),
            },
            "checkpoint": "" if settings.checkpoint is None else str(settings.checkpoint),
            "machine": machine(devices),
        }
        models = self._digests(_state(context, engine))
        self._write(lambda: {**line, "models": models})

    def load(self, context: RunContext, engine: EngineProtocol | None) -> None:
        """The run goes on from the state after an exchange."""
        if engine is None:
            return
        position = engine.exchange_position
        number, models = position.sequence if position is not None else 0, self._digests(_state(context, engine))
        self._write(lambda: {"kind": "resume", "n": number, "models": models})

    def gave(self, fragment: int, state: Mapping[str, Tensor]) -> None:
        """A block of this fragment is over, and what the tensors hold goes into an exchange."""
        host = torch.device("cpu")
        copies = {name: x if x.device == host else x.to(host) for name, x in state.items()}
        self._given[fragment] = self._thread.submit(digest, copies)

    def merged(
        self, fragment: int | None, n: int, state: Mapping[str, Tensor], summary: ExchangeSummary | None
    ) -> None:
        """Exchange `n` was applied, and left this state."""
        self._wait()  # the copy's memory is used again
        if fragment is None:
            assert self._context is not None
            fragment, state = GRADIENTS, plain_state(self._context.owned, self._context.model)
        copies = self._copies.setdefault(("model", fragment), Snapshot()).take(dict(state))
        given = self._given.pop(fragment, None)
        headers = summary.headers if summary is not None else ()
        steps = self._committed
        places, unknown = self._places.take(steps)

        def line() -> dict[str, Any]:
            return {
                "kind": "merge",
                "n": n,
                "fragment": fragment,
                "steps": steps,
                "given": given.result() if given is not None else "",
                "model": digest(copies),
                "work": [[h.minibatches if h.brings else 0, h.factor if h.brings else 0.0] for h in headers],
                "places": places,
                "unknown": unknown,
            }

        self._write(line)
        if self._until is not None and n >= self._until:
            self.reached = True

    @property
    def _committed(self) -> int:
        """How many of this worker's minibatches, from the first, are in the global model."""
        return self._engine.steps_committed if self._engine is not None else 0

    def stepped(self) -> None:
        """End the program, if exchange `until` is over."""
        if self.reached:
            self.reached = False
            raise SystemExit(0)

    def end(self) -> None:
        """The run ended in order."""
        places, unknown = self._places.take(self._committed)
        self._write(lambda: {"kind": "end", "places": places, "unknown": unknown})

    def flush(self) -> None:
        """Wait until all is written."""
        self._wait()

    def close(self) -> None:
        """Write what is under way, and close the file."""
        if self._closed:
            return
        self._closed = True
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._file.close()

    # -- the file ---------------------------------------------------------------------------------

    def _digests(self, state: State) -> dict[str, str]:
        return {str(fragment): digest(Snapshot().take(dict(tensors))) for fragment, tensors in state.items()}

    def _write(self, line: Callable[[], dict[str, Any]]) -> None:
        """Add a line, whose content a thread computes."""
        self._wait()
        self._last = self._thread.submit(self._append, line)

    def _append(self, line: Callable[[], dict[str, Any]]) -> None:
        text = canonical({**line(), "line": self._number + 1, "prev": self._previous})
        self._number, self._previous = self._number + 1, hash_of(text)
        self._file.add(text)
        self._file.flush()

    def _wait(self) -> None:
        """Wait for the last line; raises what went wrong with it."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()


def _state(context: RunContext, engine: EngineProtocol) -> State:
    blocks = getattr(engine, "blocks", None)
    if isinstance(blocks, FragmentedModel) and not context.progress.lockstep:
        return {number: update.state.tensors() for number, update in enumerate(blocks.updates)}
    return {GRADIENTS: plain_state(context.owned, context.model)}


def machine(devices: Iterable[str]) -> dict[str, Any]:
    """What decides the bits of this worker's sums, and the versions of what it runs."""
    return {
        "cpu": _processor(),
        "arch": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": sorted(set(devices)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "paceline": __version__,
    }


def seeds() -> dict[str, str]:
    """The variables from which an unchanged program's start follows, as far as they are set."""
    return {name: os.environ[name] for name in (*SEEDS, LINES) if name in os.environ}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _append_to(path: Path) -> tuple[int, Path]:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666), path


def _cut_half_line(path: Path) -> None:
    """Cut what the writer of before had not finished when it was killed."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
