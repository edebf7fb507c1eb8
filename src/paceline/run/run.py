# SPDX-License-Identifier: Apache-2.0
"""`Run`: what :func:`paceline.attach` returns. It hooks `optimizer.step()`; its parts do the work."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from torch import Tensor

from paceline import checkpoint
from paceline.communication import Transport
from paceline.communication.base import Pending
from paceline.core.flat import Modules
from paceline.core.world import World
from paceline.data.sharing.loader_registry import SharedLoader
from paceline.errors import ClosedError
from paceline.rules.rule import Rule
from paceline.run import assembly
from paceline.tuning.request_files import TuneRequest
from paceline.update.engine import exit_handling, global_model
from paceline.update.engine.settings import Settings

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
EVERY_S = 1.0
"""Least time between two reports of a loop."""


class TurnReports:
    """Reports the turns of the outermost loop to the event log, from which `paceline run` and `watch` know the end."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note, self._at = note, float("-inf")

    def report(self, turn: int, turns: int) -> None:
        """`turn` of `turns` are over; reported at most every `EVERY_S`, and at the end."""
        now = time.monotonic()
        if turns > 0 and (now - self._at >= EVERY_S or turn >= turns):
            self._at = now
            self._note("turn", turn=turn, turns=turns)


class MainLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the worker that speaks for all, and on no other."""

    def __init__(self, speaks: Callable[[], bool]) -> None:
        super().__init__(logging.getLogger("program"), {})
        self._speaks = speaks

    def isEnabledFor(self, level: int) -> bool:
        """Whether a message of this level is written here."""
        return self._speaks() and super().isEnabledFor(level)


def by_all(call: str) -> Callable[[Method], Method]:
    """Decorates a method of `Run` that every worker calls: mismatched calls are reported as `call`."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._transport.calling(call):
                return method(self, *args, **kwargs)

        return cast(Method, called)

    return around


class Messages:
    """`run.messages`: messages of the user's program between workers.

    Every operation returns a handle with `wait()`, which has the run's deadline. `send` and `receive` start at once.
    The other operations are collective: every worker calls them in the same order, and they start when all workers
    have. A call that only some workers make is refused on all.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x`, any shape and dtype, to worker `to`, which has to `receive` it; do not change `x` before `wait`."""
        return self._transport.send(x, to)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Fill `x` with the next tensor that worker `source` sends to this one, of the same shape and dtype."""
        return self._transport.receive(x, source)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Copy the `x` of worker `source` into `x` of every worker, in place."""
        self._all_call("broadcast(..)")
        return self._transport.broadcast(x, source)

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over all workers, in place."""
        self._all_call("all_reduce(..)")
        return self._transport.all_reduce(x)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, ..): row i is `x` of worker i."""
        self._all_call("all_gather(..)")
        return self._transport.all_gather(out, x)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's `value` (serializable as JSON), in rank order; waits."""
        with self._transport.calling("run.messages.gather(..)"):
            return self._transport.gather_json(value)

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self._all_call("barrier()")

    def _all_call(self, call: str) -> None:
        """Wait until all workers make this call."""
        with self._transport.calling(f"run.messages.{call}"):
            self._transport.meet()


class Run:
    """A model in training under a rule; `attach` returns it. As a context manager it calls `close` at the end.

    >>> import torch, paceline
    >>> class Lines:  # a sink
    ...     def log(self, values: dict[str, float], step: int) -> None:
    ...         print(step, values)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with paceline.attach(model, optimizer, "bmuf") as run:
    ...     [len(batch) for batch in run.share(torch.randn(20, 4).split(8))]
    ...     with run.global_model() as whole:
    ...         whole is model, run.model_for_export() is model
    ...     run.log_to(Lines())
    ...     run.log(loss=0.5)
    [8, 8, 4]
    (True, False)
    0 {'loss': 0.5}
    """

    def __init__(self, model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> None:
        self._closed = False
        self._parts = assembly.assemble(model, optimizer, rule, settings)
        self._context, self._state, self._engine = self._parts.context, self._parts.state, self._parts.engine
        self._model, self._transport = self._context.model, self._context.transport
        self.mistakes = self._parts.mistakes  # warns of common ones of the program
        assembly.start(self._parts, self)
        self._unregister = exit_handling.close_at_exit(self)

    @property
    def world(self) -> World:
        """This worker's present coordinates."""
        return self._transport.world

    @property
    def messages(self) -> Messages:
        """Messages of the user's own between workers."""
        return Messages(self._transport)

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for all: it has rank 0. For what is to be done once, and asks no other worker."""
        return self.world.rank == 0

    @property
    def rule(self) -> Rule:
        """The rule, with its present numbers."""
        return self._context.rule

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent."""
        return self._transport.bytes_sent

    @property
    def minibatches(self) -> int:
        """Steps that this worker's optimizer made."""
        return self._context.progress.steps

    @property
    def samples(self) -> int:
        """Samples that this worker trained on."""
        return self._context.loaders.samples

    @property
    def blocks(self) -> int:
        """Blocks exchanged so far, or pushes under asynchronous rules."""
        return self._parts.blocks

    @property
    def epoch(self) -> int:
        """Epoch of the first shared loader, under way or next; after a resume, where to go on."""
        return self._context.loaders.epoch

    @property
    def logger(self) -> MainLogger:
        """A logger, named "program", that writes on the worker of rank 0 only."""
        return MainLogger(lambda: self.is_main)

    def print(self, *values: object, **settings: Any) -> None:
        """As Python's `print`, on the worker of rank 0 only."""
        if self.is_main:
            builtins.print(*values, **settings)

    def progress(self, loop: Iterable[T], total: int | None = None, **settings: Any) -> Iterator[T]:
        """`run.progress(range(epochs))`: iterates over the outermost loop, and tells `paceline run` when the run ends.

        At a terminal rank 0 shows a bar of `tqdm`, if that is installed, with these settings. Under `paceline run` its
        status line shows the share that is done and the time that is left. `total`: the length, if `len(loop)` is not
        known.
        """
        turns = total if total is not None else len(loop) if isinstance(loop, Sized) else 0
        reports = TurnReports(self._context.monitor.note)
        reports.report(0, turns)
        if self.is_main and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                loop = importlib.import_module("tqdm.auto").tqdm(loop, total=total, **settings)
        for turn, item in enumerate(loop, start=1):
            yield item
            reports.report(turn, turns)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes exchange no gradients (under block rules they never do).

        Gradients accumulate on the worker; the next pass outside the context, or the step, exchanges them. It is for
        passes that are not training, and saves traffic during gradient accumulation, which is detected without it.
        """
        return self._parts.hooks.no_sync()

    # -- data, metrics, settings ------------------------------------------------------------------

    def share(self, loader: Iterable[Any], even: bool = False) -> SharedLoader:
        """This worker's part of a loader: every sample of an epoch on exactly one worker.

        Works with a `DataLoader` and with any iterable of batches that every worker sees in the same order. May be
        called once, or for each epoch.

        Args:
            loader: the program's own.
            even: under asynchronous rules a fast worker gets more batches than a slow one, and makes more steps. With
                `even=True` all get the same number, for programs that rely on it, such as a scheduler with a fixed
                number of steps; fast workers then wait for stragglers at the end.
        """
        self._check_open()
        return self._context.loaders.share(loader, even)

    def log(self, /, **values: float) -> None:
        """Write values (such as `loss=loss.item()`) to the event log, and to the sinks, at the present minibatch."""
        numbers, context = self.mistakes.numbers(values, self._closed), self._context
        for name, value in numbers.items():
            context.monitor.value(name, value)
        self._parts.sinks.log(numbers, context.progress.steps)

    def log_to(self, sink: Any, *, every_s: float = 1.0, each: bool = False) -> None:
        """Also send the values of `log` to a sink, and the run's own numbers under `paceline/`: block, bytes, seconds
        of computing, waiting and exchanging, rates, and tunable settings.

        A thread writes them, so a slow sink does not delay training: values that do not fit into its queue are dropped
        and counted. A sink that fails causes a warning. The step is the number of this worker's minibatches.

        Args:
            sink: a SummaryWriter, the result of `wandb.init()` or `trackio.init()`, the module `mlflow` with an active
                run, or anything with `log(values, step)`. Where only rank 0 should open the sink, other workers pass
                None.
            every_s: least time between two reports of the run's own numbers, seconds.
            each: write on every worker; by default only rank 0 writes.
        """
        self._check_open()
        if sink is not None:
            self._parts.sinks.add_sink(sink, self.world.sign, every_s, each)

    def serve_metrics(self, address: str) -> str:
        """Serve this worker's numbers for Prometheus, at `http://HOST:PORT/metrics`, until the run is closed; returns
        the address. Worker k of its host takes PORT + k; port 0 takes any free port."""
        self._check_open()
        return self._parts.sinks.serve_metrics(address)

    def tune(self, /, *, revert: bool = False, **settings: Any) -> TuneRequest:
        """Change settings during the run, on all workers at the same block; one worker asks, or several.

        The change takes effect after the next exchange, between two steps; under overlap, when the next exchange to
        begin has landed. Under asynchronous rules each worker reads it from the log directory before a later push. With
        one worker it takes effect at once. Every worker's event log records the change, and checkpoints hold it. A
        pending request is saved in the checkpoint of the worker that made it.

        >>> import torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> run.tune(lr=0.05).applied
        True
        >>> optimizer.param_groups[0]["lr"]
        0.05
        >>> run.close()

        Args:
            revert: undo the last change instead.
            settings: `lr`, `lr_factor`, `momentum`, `betas`, `weight_decay`, `eps` of the optimizers, for all groups
                or for some, as in `lr={0: 0.1, 1: 0.01}`; `period`, `gain`, `outer_momentum`, `outer_lr` of the rule,
                where it has them. See :mod:`paceline.tuning.tunables` for rates under a scheduler.

        Returns:
            The outcome: `applied`, `refused`, `block`, `minibatch`. No worker applies an invalid change.
        """
        self._check_open()
        return self._context.tuner.ask(settings, revert)

    @by_all("run.merge()")
    def merge(self) -> None:
        """Merge the work of all workers so far into the global model; every worker calls it at the same place.

        Under block rules the current block ends here, at any number of minibatches; the call waits for its result, and
        the next block begins. Under asynchronous rules it waits for pending pushes, and all workers that live take the
        same values. Under gradient rules every step is merged already, and it does nothing. Call it at the end of an
        epoch, before the global model is evaluated or saved.
        """
        self._check_open()
        if self._engine is not None:
            self._engine.merge()
            self._context.loaders.entered(self._engine.steps_committed)

    def include(self, **objects: Any) -> None:
        """Name the objects that checkpoints hold besides model and optimizer: schedulers, a scaler, anything with a
        `state_dict` and a `load_state_dict`."""
        self._state.include(objects)

    def global_state(self) -> dict[str, Tensor]:
        """The global model as a state dictionary of the (unwrapped) model; copies, on the model's device."""
        self._context.loaders.settle()
        return self._state.global_state()

    def model_for_export(self) -> Any:
        """A copy of the model (or models) with the global parameters and buffers.

        Under block momentum this is theta, not the look-ahead start from which the workers train on; with a rule's
        `ema=` the average of theta. Needs no communication; between exchanges it is that of the last one.
        """
        self._context.loaders.settle()
        return global_model.twin(self._model, self._state.global_tensors())

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Context in which the user's model holds the global parameters (for evaluation); restores its own."""
        self._context.loaders.settle()
        ahead = self._state.global_model
        with global_model.swapped(self._model, ahead.global_parts if ahead is not None else []):
            yield self._model

    # -- checkpoints ------------------------------------------------------------------------------

    @by_all("run.checkpoint()")
    def checkpoint(self) -> bool:
        """Take the checkpoint step that is due; returns whether one was.

        With `attach(..., checkpoint=DIR)` one is due every `every_blocks` exchanges. It is taken at the top of the
        program's loop, after schedulers have made their steps: programs that iterate over `run.share` need no call,
        other programs call this at the top of their loop, on every worker. Steps are directories `DIR/step-000000120`,
        named by the minibatches that each worker had made, with the files of `save`; the newest `keep` stay. The loop
        stops for a copy into host memory; a thread writes it. A failed write is a warning, and training continues.
        """
        self._check_open()
        loaders = self._context.loaders
        take = loaders.safe() if loaders.idle else None
        if take is None:
            return False
        take()
        return True

    @by_all("run.save(..)")
    def save(self, path: str | Path, **objects: Any) -> None:
        """Write a checkpoint of everything; every worker calls it at the same place of the program.

        >>> import tempfile, torch, paceline
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = paceline.attach(model, optimizer, "bmuf")
        >>> place = tempfile.mkdtemp() + "/saved"
        >>> run.save(place)
        >>> run.resume(place)
        True
        >>> run.close()

        Args:
            path: a directory, made or replaced in one piece; if it cannot be written, an older one is untouched, and
                every worker raises `CheckpointError`.
            objects: as for `include`.
        """
        self._check_open()
        self.include(**objects)
        checkpoint.save(Path(path), self._transport, self._state.about(), *self._state.saved())
        self._context.monitor.note("save", path=str(path))

    @by_all("run.resume(..)")
    def resume(self, path: str | Path | None = None, **objects: Any) -> bool:
        """Restore the state of a `save` or of a checkpoint step.

        Without a path it takes the newest step of `attach(..., checkpoint=...)` whose checksums match on all workers; a
        damaged step is reported, and the previous one is used. Returns False if there is no step: a fresh start. A path
        or URL names a checkpoint, or a directory of steps, of which the newest is taken in the same way.

        Call it before the training loop. The loop continues at `run.epoch`, and `share` in the middle of that epoch.

        On as many workers as saved it, the run continues with the same bits as if it had never stopped. On another
        number M it continues from the same global model, and M = 1 is the model and the optimizer without any rule:

        - The checkpoint gives the global model, outer state, the count of steps, the included objects (rank 0's where
          workers differ), and the positions in the data: the epoch continues with the samples that were not in the
          global model, each once.
        - An optimizer that steps on the workers gets the mean of their states where a block rule lets them differ
          (rank 0's of what is no floating-point tensor), or the state with which a block begins, under
          local_state="compensate" and "reset".
        - Under a rule with `ema=` workers train on from the model itself, but a single worker from its average.
        - These start afresh: an unfinished block, codec state (residuals, momentum, factors), paces, replicas, and the
          history for delay compensation. A new rank's random generators follow from the seed and the rank.

        Each worker reads the files of the old ranks that it needs, from a shared file system or from copies. Where
        there is none, all are damaged, or it is another program's, every worker raises `CheckpointError`.
        """
        self._check_open()
        self.include(**objects)
        return assembly.resume_run(self._parts, path)

    def snapshot(self) -> Any:
        """A checkpoint in memory; every worker calls it at the same place, between two steps.

        Raises `UnsupportedError` in the warm-up of a block rule, and under asynchronous rules.
        """
        self._check_open()
        return self._state.snapshot()

    @by_all("run.restore(..)")
    def restore(self, snapshot: Any) -> None:
        """Go back to a `snapshot`, bit for bit; every worker calls it, between two steps. Gradients are dropped."""
        self._check_open()
        self._state.restore(snapshot)

    # -- the end ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self.world.sign("this run is closed; attach again to go on"))

    def close(self) -> None:
        """End the run together with all workers: merge the rest of the last block, wait for workers that have more
        data, and leave the global model in the user's model. May be called again."""
        try:
            if not self._closed and not self._parts.left:
                assembly.finish(self._parts)
        finally:
            self.abandon()

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave at once after an error of this worker, which is logged; its peers see the closed connection."""
        if not self._closed:
            self._closed = True
            if error is not None:
                self._context.monitor.note("error", message=f"{type(error).__name__}: {error}")
            self._unregister()
            assembly.take_apart(self._parts)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends = isinstance(error, SystemExit) and exit_handling.succeeded(error.code)
        if error is None or ends or self._parts.left:
            self.close()
        else:
            self.abandon(error)
