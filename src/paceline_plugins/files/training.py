# SPDX-License-Identifier: Apache-2.0
"""The loop of a worker: write the model, run the tool, read what it wrote, merge.

The tensors of the model file are the parameters of a run over arrays (:mod:`paceline.doors.adapters.arrays`), and an
invocation of the tool is one of its steps, so rule, transport, log, checkpoints and tuning are those of any run. The
bytes that are no numbers are rank 0's on all workers.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.communication import schedulers
from paceline.core.world import World
from paceline.doors.adapters.arrays import WritableRun
from paceline.errors import DataError, MismatchError
from paceline.tuning import Newbob
from paceline_plugins.files import parts, placeholders
from paceline_plugins.files.formats import Format, ModelFile, check_same
from paceline_plugins.files.invocation import environment_of, invoke, say
from paceline_plugins.files.plan import Plan, checksum
from paceline_plugins.files.workplace import Workplace, write


def scheduled(start: float, end: float | None, block: int, blocks: int) -> float:
    """The rate of a block before Newbob's factor."""
    return start if end is None else start * (end / start) ** (block / max(1, blocks))


class Halving:
    """Newbob over the losses that the tools report; every worker sees the same mean, and scales its own rate at once.

    Args:
        messages: of the run, for the mean.
    """

    def __init__(self, messages: Any, **options: float) -> None:
        self.factor = 1.0  # of the rate
        self._newbob = Newbob(_Local(self, messages), **options)  # type: ignore[arg-type]

    def validated(self, loss: float) -> bool:
        """Call it on every worker with the loss of its tool; returns whether to stop."""
        return self._newbob.validated(loss)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"factor": self.factor, "newbob": self._newbob.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.factor = float(state["factor"])
        self._newbob.load_state_dict(state["newbob"])


class _Local:
    """What Newbob asks of a run, so that a halving waits for no exchange: each worker is the one that tunes."""

    world = World()

    def __init__(self, halving: Halving, messages: Any) -> None:
        self._halving, self.messages = halving, messages

    def tune(self, lr_factor: float) -> None:
        self._halving.factor *= lr_factor


class Progress:
    """How far a run is; part of its checkpoints.

    Attributes:
        epoch: under way, or next.
        done: parts of it that are done.
        skeleton: the bytes of the model that are no numbers.
    """

    def __init__(self, skeleton: bytes, halving: Halving | None) -> None:
        self.epoch = self.done = 0
        self.rows: list[dict[str, Any]] = []  # a row for each block, for the journal
        self.stopped = False  # Newbob ended the training
        self.skeleton, self._halving = skeleton, halving

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {
            "place": [self.epoch, self.done, self.stopped],
            "rows": self.rows,
            "halving": None if self._halving is None else self._halving.state_dict(),
            "skeleton": torch.frombuffer(bytearray(self.skeleton), dtype=torch.uint8),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.epoch, self.done, self.stopped = state["place"]
        self.rows = list(state["rows"])
        if self._halving is not None and state["halving"] is not None:
            self._halving.load_state_dict(state["halving"])
        self.skeleton = state["skeleton"].numpy().tobytes()


class Training:
    """One worker's training.

    Args:
        plan: the options.
        run: over the model's tensors.
        form: the format of model files.
        model: to start from; its tensors are those of the run.
        keep: names of tensors that are not trained.
    """

    def __init__(self, plan: Plan, run: WritableRun, form: Format, model: ModelFile, keep: set[str]) -> None:
        self._plan, self._run, self._form, self._model, self._keep = plan, run, form, model, keep
        self._halving = Halving(run.messages) if plan.newbob else None
        self._progress = Progress(model.skeleton, self._halving)
        self._place = Workplace(Path(plan.work), Path(plan.model).suffix)
        lines = None if plan.data is None else parts.read_list(Path(plan.data))
        self._parts = parts.Parts(plan.parts, plan.seed, plan.shuffle, lines)
        self._environment = _environment(run.world.local_rank, run.world.size)
        self._scratch = self._place.scratch(run.world.rank)
        self._warned = False

    def train(self) -> None:
        """Train to the end of the last epoch, from the newest checkpoint if there is one."""
        self._check_alike()
        self._resume()
        workers = self._run.world.size
        parts.check_divides(workers, self._plan.parts, self._progress.done)
        self._prune()
        while self._progress.epoch < self._plan.epochs and not self._progress.stopped:
            self._block()
        if self._run.world.rank == 0:
            write(Path(self._plan.out), self._merged())
            self._place.write_journal(self._plan, self._progress.rows, done=True)

    # -- the beginning ----------------------------------------------------------------------------

    def _check_alike(self) -> None:
        """Refuse machines that were started with different options or files."""
        own = self._plan.settled
        for rank, other in enumerate(self._run.messages.gather(own)):
            odd = [name for name in own if other[name] != own[name]]
            if odd:
                raise MismatchError(
                    self._run.world.sign(
                        f"worker {rank} was started with other options than this one ({', '.join(odd)} differ); give "
                        "the same options and the same files on every machine"
                    )
                )

    def _resume(self) -> None:
        self._run.include(files=self._progress)
        if any(self._run.messages.gather(self._place.has_steps())):
            self._run.resume(self._place.steps)
            self._model = ModelFile(self._model.tensors, self._progress.skeleton)
            self._say(f"continues after block {self._blocks}")

    @property
    def _blocks(self) -> int:
        """Blocks that are done."""
        return len(self._progress.rows)

    # -- a block ----------------------------------------------------------------------------------

    def _block(self) -> None:
        began, own = time.monotonic(), time.process_time()
        part = self._parts.number(self._progress.epoch, self._progress.done + self._run.world.rank)
        rate = self._rate()
        found, loss = self._invoke(part, rate)
        tool_s = time.monotonic() - began
        self._run.log(**({} if self._plan.loss is None else {"loss": loss}))
        self._run.step(found.tensors)
        self._model = ModelFile(found.tensors, self._shared(found.skeleton))
        row = {"epoch": self._progress.epoch, "lr": rate, "loss": self._mean(loss), "tool_s": round(tool_s, 3)}
        self._advance(row)
        if self._run.world.rank == 0:
            self._place.write_merged(self._blocks, self._merged())
        self._run.save(self._place.step(self._blocks))
        row["own_cpu_s"] = round(time.process_time() - own, 4)  # without the tool
        if self._run.world.rank == 0:
            self._place.write_journal(self._plan, self._progress.rows, done=False)
        self._prune()

    def _rate(self) -> float | None:
        plan = self._plan
        if plan.lr is None:
            return None
        blocks = plan.epochs * plan.parts // self._run.world.size
        factor = 1.0 if self._halving is None else self._halving.factor
        return self._run.tuned("lr", factor * scheduled(plan.lr, plan.lr_final, self._blocks, blocks))

    def _invoke(self, part: int, rate: float | None) -> tuple[ModelFile, float]:
        """Run the tool; the model that it wrote, and its loss."""
        suffix = self._place.suffix
        given, wanted, lines = (self._scratch / name for name in (f"in{suffix}", f"out{suffix}", "list"))
        wanted.unlink(missing_ok=True)
        given.write_bytes(self._form.write(self._model))
        if self._plan.data is not None:
            lines.write_bytes(self._parts.lines(self._progress.epoch, part))
        world, epoch = self._run.world, self._progress.epoch
        values = {
            "model": given,
            "model_out": wanted,
            "part": part,
            "job": part + 1,
            "parts": self._plan.parts,
            "list": lines,
            "lr": "" if rate is None else f"{rate:.10g}",
            "epoch": epoch,
            "block": self._blocks,
            "rank": world.rank,
            "workers": world.size,
            "local_rank": world.local_rank,
            "seed": self._parts.seed(epoch, part),
        }
        command = placeholders.filled(self._plan.command, values)
        try:
            loss = invoke(command, self._plan.starter, self._environment, self._plan.loss)
            return self._read(wanted), loss
        except DataError as error:
            where = f"block {self._blocks + 1}, part {part} of {self._plan.parts}"
            raise DataError(world.sign(f"{where}: {error}")) from error

    def _read(self, path: Path) -> ModelFile:
        """The model that the tool wrote."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"the tool ended with exit code 0 and wrote no model to {path}") from None
        try:
            found = self._form.read(data, self._keep)
        except DataError as error:
            raise DataError(f"the model {path} that the tool wrote cannot be read: {error}") from error
        check_same(self._model, found, f"the model {path} that the tool wrote")
        self._warn_unchanged(found)
        return found

    def _warn_unchanged(self, found: ModelFile) -> None:
        """Say once that the tool trains nothing, if it does not."""
        pairs = zip(self._model.tensors.values(), found.tensors.values(), strict=True)
        if not self._warned and all(torch.equal(one, other) for one, other in pairs):
            self._warned = True
            say(self._run.world.sign("the tool wrote the numbers of the model that it read; does it train?"))

    def _shared(self, skeleton: bytes) -> bytes:
        """Rank 0's bytes between the numbers."""
        rows = self._run.messages.gather([checksum(skeleton), len(skeleton)])
        if all(row == rows[0] for row in rows):
            return skeleton
        tensor = torch.zeros(rows[0][1], dtype=torch.uint8)
        if self._run.world.rank == 0:
            tensor = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
        self._run.messages.broadcast(tensor).wait()
        return tensor.numpy().tobytes()

    def _mean(self, loss: float) -> float | None:
        """Of all workers; None without a loss."""
        if self._plan.loss is None:
            return None
        losses = [float(one) for one in self._run.messages.gather(str(loss))]  # JSON has no nan
        return sum(losses) / len(losses)

    def _advance(self, row: dict[str, Any]) -> None:
        progress = self._progress
        row["block"] = self._blocks + 1
        progress.rows.append(row)
        progress.skeleton = self._model.skeleton
        progress.done += self._run.world.size
        rate = "" if row["lr"] is None else f", rate {row['lr']:.6g}"
        loss = "" if row["loss"] is None else f", loss {row['loss']:.6g}"
        self._say(f"block {self._blocks}, epoch {progress.epoch}{rate}{loss}, {row['tool_s']:.3g} s")
        if progress.done == self._plan.parts:
            progress.epoch, progress.done = progress.epoch + 1, 0
            if self._halving is not None:
                progress.stopped = self._halving.validated(row["loss"])
        if progress.stopped:
            self._say("halving the rate helps no more: the training ends here (Newbob)")

    def _prune(self) -> None:
        if self._run.world.local_rank == 0:
            self._place.prune(self._plan.keep)

    # -- files ------------------------------------------------------------------------------------

    def _merged(self) -> bytes:
        """The file of the global model."""
        with self._run.global_model():
            return self._form.write(self._model)

    def _say(self, text: str) -> None:
        if self._run.world.rank == 0:
            say(text)


def untrained(tensors: dict[str, Tensor]) -> set[str]:
    """Names of tensors with inf or nan in the model to start from: constants, which stay as they are."""
    return {name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()}


def _environment(local_rank: int, size: int) -> dict[str, str]:
    """The tool's variables; on a machine with several devices CUDA shows it its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = schedulers.own_device(local_rank, size, visible, torch.cuda.device_count())
    return environment_of(os.environ) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
