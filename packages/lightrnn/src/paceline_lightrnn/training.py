# SPDX-License-Identifier: Apache-2.0
"""Training in rounds, on any number of workers under any rule.

A round trains the model on one table. Between two rounds the workers sum their costs of all words in all rows and
columns, worker 0 re-allocates the words, and all workers continue with the new table. Weights and optimizer state stay:
vectors belong to rows and columns, not to words. The learning rate schedule restarts.
Source: Li et al., NIPS 2016, section 3.3.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline
from paceline import Rule, UnsupportedError
from paceline_lightrnn import files, rounds
from paceline_lightrnn.allocation import SWEEPS, Allocation, reallocate
from paceline_lightrnn.building import Model
from paceline_lightrnn.corpus import Corpus, Parts, Passages
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.position import Position
from paceline_lightrnn.preparing import Data
from paceline_lightrnn.rates import make_optimizer, share_of_rate
from paceline_lightrnn.scoring import Score, place, score
from paceline_lightrnn.settings import Course
from paceline_lightrnn.show import Show, Silent
from paceline_lightrnn.state import PADDING, State

STATE, HISTORY, COSTS, ALLOCATION = "state", "history.json", "costs.safetensors", "allocation"
LOG_EVERY = 20  # steps
KEEP = 2  # saved states


def train(
    model: Model,
    data: Data,
    course: Course,
    folder: Path,
    *,
    rule: Rule | str | None = None,
    show: Show | None = None,
    resume: bool = True,
) -> list[dict[str, Any]]:
    """Train a model in rounds; every worker calls it with the same arguments.

    Args:
        model: a LightRNN, or for comparison a WordRNN, whose rounds have no re-allocation. At the end it holds the
            global model and the last table.
        data: from `prepare`.
        course: rounds, epochs, rates and so on.
        folder: shared by all workers: `state` (to resume from), `history.json`, `costs.safetensors`, and at the end
            the model.
        rule: as `paceline.attach` takes it.
        show: displays progress.
        resume: resume from the state in `folder`, if there is one.

    Returns:
        A row for each round: `round`, `words`, `seconds`, `words_per_s`, `perplexity` and, if a re-allocation followed,
        `cost_before`, `cost_after` and `lower_bound` (nats per word of the text), `perplexity_reallocated` and
        `allocation_s`.
    """
    return _Training(model, data, course, folder, rule, show or Silent()).go(resume)


def has_state(folder: Path) -> bool:
    """Whether there is a state to resume from."""
    return (folder / STATE).is_dir() and any((folder / STATE).glob("step-*"))


class _Training:
    """One worker's part of a training."""

    def __init__(
        self, model: Model, data: Data, course: Course, folder: Path, rule: Rule | str | None, show: Show
    ) -> None:
        self.model, self.data, self.course, self.folder = model, data, course, folder
        self.table_model = model if isinstance(model, LightRNN) else None
        self.optimizer = make_optimizer(model, course)
        self.run = paceline.attach(model, self.optimizer, rule, seed=course.seed)
        self.show: Show = show if self.run.world.rank == 0 else Silent()
        # whole batches, of which every worker gets a part, so that all make the same number of steps
        multiple = course.batch * math.ceil(self.run.world.size / course.batch)
        self.short = course.short  # for a WordRNN as well, so that it reads the same text
        self.rounds = self.short + course.rounds
        passages = Passages(data.train, course.length, multiple)
        self.share = self.run.share(DataLoader(passages, course.batch, shuffle=True))
        self.parts = Parts(data.train, max(1, self.short), course.share, course.length, multiple)
        self.short_share = self.run.share(DataLoader(self.parts, course.batch, shuffle=True))
        self.position = Position(model, self.run.world.size)
        self.scheduler = LambdaLR(self.optimizer, lambda step: share_of_rate(self._done()))
        self._since_save = 0
        self._losses: list[Tensor] = []

    def go(self, resume: bool) -> list[dict[str, Any]]:
        """Train all remaining rounds."""
        try:
            with self.run:
                self.run.include(position=self.position)
                if resume and has_state(self.folder):
                    self.run.resume(self.folder / STATE)
                    self.show.say(f"resuming in round {self.position.round + 1}")
                while self.position.round < self.rounds:
                    if not self.position.trained:
                        self._train_round()
                    self._end_round()
        finally:
            self.model.train(False)
        if self.run.world.rank == 0:
            self.model.save(self.folder)
            shutil.rmtree(self.folder / ALLOCATION, ignore_errors=True)
        return self.position.history

    # -- within a round ---------------------------------------------------------------------------

    def _done(self) -> float:
        """The part of the round that is done, 0 to 1."""
        share, first, epochs = self._pass
        done: float = (share.epoch - first + share.progress) / epochs
        return min(1.0, max(0.0, done))

    @property
    def _is_short(self) -> bool:
        return self.position.round < self.short

    @property
    def _pass(self) -> tuple[Any, int, int]:
        """The round's loader, its first epoch, and its number of epochs."""
        number = self.position.round
        if self._is_short:
            return self.short_share, number, 1
        return self.share, (number - self.short) * self.course.epochs, self.course.epochs

    def _train_round(self) -> None:
        share, first, epochs = self._pass
        self.parts.part = self.position.round if self._is_short else 0
        self.model.train()
        while share.epoch < first + epochs:
            last = share.epoch == first + epochs - 1
            if last and self.course.costs == "training" and self.table_model is not None:
                self._begin_costs(self.table_model)
            for passages in share:
                began = time.perf_counter()
                self._read(passages.to(place(self.model)))
                self.position.seconds += time.perf_counter() - began
                self._shown()
                self._since_save += 1
                if self._since_save >= self.course.save_every and not self._asynchronous:
                    self._save()

    def _begin_costs(self, model: LightRNN) -> None:
        if self.position.costs is None and not self.position.costs_lost:
            if not rounds.fits_dense(model.table):
                raise UnsupportedError(
                    "costs are exact only for weights that stand still where they are kept as factors, and this table "
                    'is too large for others; take costs="pass"'
                )
            self.position.costs = rounds.new_costs(model)

    @property
    def _asynchronous(self) -> bool:
        """Whether workers synchronise between epochs only."""
        return hasattr(self.run.rule.schedule, "staleness") and self.run.world.size > 1

    def _read(self, passages: Tensor) -> None:
        """Train on passages, shape (B, length), with an optimizer step for each window."""
        state = self.model.begin(len(passages))
        for words in torch.split(passages, self.course.window, 1):
            loss, state = self._loss(words, state.detach())
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.course.clip)
            self.optimizer.step()
            self.scheduler.step()
            self._losses.append(loss.detach())
            if len(self._losses) == LOG_EVERY:
                self.run.log(loss=float(torch.stack(self._losses).mean()))
                self._losses.clear()
        self.position.words += int((passages != PADDING).sum())

    def _loss(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        costs, model = self.position.costs, self.table_model
        if costs is None or model is None:
            return self.model.loss(words, state)
        h_row, h_column, state = model.halves(words, state)
        costs.add(model, words, h_row.detach(), h_column.detach())
        log_probs = model.log_prob_of_halves(words, h_row, h_column)
        return -log_probs.sum() / (words != PADDING).sum().clamp(min=1), state

    def _shown(self) -> None:
        position = self.position
        rate = position.words / max(position.seconds, 1e-9) * self.run.world.size
        what = f"round {position.round + 1} of {self.rounds}"
        self.show.doing(what, self._done(), 1.0, f"{rate:,.0f} words/s")

    # -- after a round ----------------------------------------------------------------------------

    def _end_round(self) -> None:
        position = self.position
        again = self.table_model is not None and self.course.costs != "none" and position.round + 1 < self.rounds
        if not position.trained:
            with self.run.global_model():
                position.row = self._measured()
                position.costs_sum = self._gather(self.table_model) if again and self.table_model else ""
            position.trained, position.costs = True, None
            self._save()
        if again and self.table_model is not None:
            with self.run.global_model():
                self._allocate(self.table_model)
        position.end_round()
        self._save()
        self._write_history()

    def _measured(self) -> dict[str, Any]:
        """The round's row so far."""
        position, found = self.position, self._perplexity("evaluating")
        counted = torch.tensor([float(position.words)], dtype=torch.float64)
        rounds.add_up(self.run, [counted])
        rate = float(counted) / max(position.seconds, 1e-9)
        self.show.say(f"round {position.round + 1}: perplexity {found:.2f}, {rate:,.0f} words/s")
        return {
            "round": position.round + 1,
            "words": int(counted),
            "seconds": round(position.seconds, 3),
            "words_per_s": round(rate, 1),
            "perplexity": found,
        }

    def _perplexity(self, what: str) -> float:
        """Of the validation text; each worker reads some lanes."""
        part, total = (self.run.world.rank, self.run.world.size), len(self.data.validation) / self.run.world.size
        mine = score(
            self.model,
            self.data.validation,
            window=self.course.window,
            part=part,
            progress=lambda words: self.show.doing(what, words, total),
        )
        both = torch.tensor([mine.nats, float(mine.words)], dtype=torch.float64)
        rounds.add_up(self.run, [both])
        found = Score(float(both[0]), int(both[1])).perplexity
        self.run.log(perplexity=found)
        return found

    def _gather(self, model: LightRNN) -> str:
        """Costs of all workers together, in a file of worker 0; its checksum."""
        costs, run = self.position.costs, self.run
        if costs is None:
            text = self._text_of_costs
            total = len(text) / run.world.size
            costs = rounds.gather(
                model,
                text,
                length=self.course.length,
                window=self.course.window,
                batch=self.course.batch,
                part=(run.world.rank, run.world.size),
                progress=lambda words: self.show.doing("gathering costs", words, total),
            )
        rounds.add_up(run, costs.tensors())
        path = self.folder / COSTS
        found = rounds.by_one(run, lambda: rounds.save_costs(path, costs, model.table))
        return str(found or "")

    @property
    def _text_of_costs(self) -> Corpus:
        """After a short round, the text of all short rounds, since one alone lacks words."""
        return self.parts.all if self._is_short else self.data.train

    def _allocate(self, model: LightRNN) -> None:
        """Re-allocate, send the table to all workers, and complete the round's row."""
        run, path = self.run, self.folder / COSTS
        known = run.world.rank != 0 or (
            bool(self.position.costs_sum) and self.position.costs_sum == rounds.checksum(path)
        )
        if not all(run.messages.gather(known)):
            self.position.costs_sum = self._gather(model)
        found: Allocation | None = rounds.by_one(run, lambda: self._allocation(model, path))
        model.table = rounds.same_table(run, model.table, None if found is None else found.table.cells)
        after = self._perplexity("evaluating the new table")
        self.position.row["perplexity_reallocated"] = after
        if found is not None:
            words = max(1, len(self._text_of_costs))
            costs = {"cost_before": found.before, "cost_after": found.after, "lower_bound": found.lower_bound}
            self.position.row |= {name: float(value) / words for name, value in costs.items()}
            self.position.row |= {"allocation_s": round(found.seconds, 3), "method": str(found.method)}
            row = self.position.row
            self.show.say(
                f"words allocated anew in {found.seconds:.1f} s: cost {row['cost_before']:.4f} -> "
                f"{row['cost_after']:.4f} nats a word, perplexity {row['perplexity']:.2f} -> {after:.2f}"
            )

    def _allocation(self, model: LightRNN, path: Path) -> Allocation:
        costs = rounds.load_costs(path, model)
        return reallocate(
            costs.source(model),
            model.table,
            progress=lambda phase, done, total: self.show.doing(f"allocating words: {phase}", done, total),
            resume=self._allocation_folder(),
            seed=self.course.seed + self.position.round,
            sweeps=1 if self._is_short else SWEEPS,  # costs of a part of the text are not worth more sweeps
        )

    def _allocation_folder(self) -> Path:
        """The folder of an interrupted re-allocation; removes those of other costs."""
        folder = self.folder / ALLOCATION / self.position.costs_sum[:16]
        for other in folder.parent.glob("*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # -- on disk ----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save all workers' states; keep the newest `KEEP`."""
        self.position.saves += 1
        self._since_save = 0
        folder = self.folder / STATE
        self.run.save(folder / f"step-{self.position.saves:09d}")
        if self.run.world.rank == 0:
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)

    def _write_history(self) -> None:
        if self.run.world.rank:
            return
        about = {"workers": self.run.world.size, "rule": self.run.rule.text(), "bytes_sent": self.run.bytes_sent}
        text = json.dumps({**about, "rounds": self.position.history}, indent=2)
        files.write_text(self.folder / HISTORY, text + "\n")
