# SPDX-License-Identifier: Apache-2.0
"""Training of a pair: a warm-up on labelled pairs, then dual learning, on any number of workers under any rule.

A step after the warm-up takes a labelled batch and an unlabelled one, of x and y in turn, and one optimizer steps both
models. Sources: He et al., Dual Learning for Machine Translation, NIPS 2016, algorithm 1; Xia et al., Dual
Supervised Learning, ICML 2017, algorithm 1.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline import DataError, Rule
from paceline_dual import evaluation, files, workers
from paceline_dual.batches import Data, Endless, pairs_of, side_of
from paceline_dual.methods import method_of
from paceline_dual.pair import DIRECTIONS, Pair
from paceline_dual.position import Position
from paceline_dual.rates import make_optimizer, make_scheduler
from paceline_dual.settings import Course
from paceline_dual.show import Show, Silent
from paceline_dual.supervised import supervised_loss
from paceline_dual.words import Words

STATE, HISTORY, COURSE, WORDS, MODEL = "state", "history.json", "course.json", "words.json", "model"
LOG_EVERY = 20  # steps
KEEP = 2  # saved states
UNLABELLED = dict(zip(DIRECTIONS, ("x", "y"), strict=True))
"""The side whose unlabelled samples a direction begins with."""


def train(
    pair: Pair,
    data: Data,
    course: Course,
    folder: Path,
    *,
    rule: Rule | str | None = None,
    words: Words | None = None,
    show: Show | None = None,
    resume: bool = True,
) -> list[dict[str, Any]]:
    """Train a pair; every worker calls it with the same arguments.

    Args:
        pair: both models. At the end they are the global models, in evaluation mode. Worker 0's priors are copied to
            all workers.
        data: labelled, unlabelled and held-out samples.
        course: steps, method, rates and so on.
        folder: shared by all workers: `course.json`, `state` (to resume from), `history.json`, `words.json`, and at
            the end the pair in `model`, as `Pair.save` writes it.
        rule: as `paceline.attach` takes it.
        words: names of symbols and labels, for the report.
        show: displays progress.
        resume: resume from the state in `folder`, if there is one.

    Returns:
        A row for each evaluation: see `evaluation.row_of`; besides `phase` (of the steps before it: "warm" or the
        method), `seconds` of training, `labelled_share` and `rates` of the next step, and on worker 0 `translations`.
        The last row is of the global model of the last exchange before the end.

    Raises:
        UnsupportedError: after the warm-up a model is no better than its prior; see `evaluation.check_warm`.
        CheckpointError: `folder` holds a training with another course.
        DataError: there are fewer samples than workers, or none of a kind that is needed.
    """
    return _Training(pair, data, course, Path(folder), rule, words, show or Silent()).go(resume)


def has_state(folder: Path) -> bool:
    """Whether there is a state to resume from."""
    return (folder / STATE).is_dir() and any((folder / STATE).glob("step-*"))


class _Training:
    """One worker's part of a training."""

    def __init__(
        self,
        pair: Pair,
        data: Data,
        course: Course,
        folder: Path,
        rule: Rule | str | None,
        words: Words | None,
        show: Show,
    ) -> None:
        self.pair, self.course, self.folder, self.words = pair, course, folder, words
        self.method = method_of(course, pair) if course.steps else None
        self.duality = course.constraint.duality(course.warm)
        self.directions = self._directions(data)
        self.heldout = pairs_of(data.heldout, "the held-out part", 1)
        self.optimizer = make_optimizer(pair, course)
        self.run = paceline.attach(pair, self.optimizer, rule, seed=course.loop.seed)
        world = self.run.world
        self.show: Show = show if world.rank == 0 else Silent()
        self.position = Position(course.loop.seed, world.rank, world.size, pair.device)
        self.scheduler = make_scheduler(self.optimizer, course, lambda: self.position.step)
        try:
            self.loaders = self._loaders(data)
        except BaseException:
            self.run.abandon()
            raise
        self._losses: list[Tensor] = []

    def _directions(self, data: Data) -> list[str]:
        """The directions with unlabelled samples."""
        if self.method is None:
            return []
        found = [name for name in DIRECTIONS if getattr(data, UNLABELLED[name]) is not None]
        if not found:
            raise DataError(
                f"the method {self.course.method} learns from unlabelled samples, and there are none of x nor of y; "
                'give some, or take the method "supervised"'
            )
        return found

    def _loaders(self, data: Data) -> dict[str, Endless]:
        size, mix = self.run.world.size, self.course.mix
        found = {"labelled": Endless(self.run, pairs_of(data.labelled, "the labelled part", size), mix.labelled)}
        for name in self.directions:
            side = UNLABELLED[name]
            samples = side_of(getattr(data, side), f"the unlabelled part of {side}", size)
            # a run identifies data by object, and one object may be given for both sides
            found[name] = Endless(self.run, copy.copy(samples), mix.unlabelled)
        return found

    # -- all steps -----------------------------------------------------------------------------

    def go(self, resume: bool) -> list[dict[str, Any]]:
        """Make all remaining steps."""
        try:
            with self.run:
                self.run.include(position=self.position)
                if self.method is not None:
                    self.run.include(method=self.method)
                self._begin(resume)
                workers.same_priors(self.run, self.pair)
                self._steps()
                for loader in self.loaders.values():
                    loader.close()
        finally:
            self.pair.eval()
        if self.run.world.rank == 0:
            self.pair.save(self.folder / MODEL)
            self._write_history(over=True)
        return self.position.rows

    def _begin(self, resume: bool) -> None:
        """Resume from the state in the folder, or begin anew."""
        if resume and self._is_there():
            self.course.check(Course.load(self.folder / COURSE), self.folder)
            self.run.resume(self.folder / STATE)
            self.show.say(f"resuming after step {self.position.step:,}")
        elif self.run.world.rank == 0:
            shutil.rmtree(self.folder / STATE, ignore_errors=True)
            (self.folder / WORDS).unlink(missing_ok=True)  # of an earlier training
            self.course.save(self.folder / COURSE)
        if self.words is not None and self.run.world.rank == 0:
            self.words.save(self.folder / WORDS)

    def _is_there(self) -> bool:
        """Whether worker 0 sees a state; only it looks, since it may write one before another worker looks."""
        said = torch.tensor([int(has_state(self.folder))])
        self.run.messages.broadcast(said).wait()
        return bool(said)

    def _steps(self) -> None:
        position, total = self.position, self.course.total
        while True:
            self._look_if_due()
            self._begin_method()
            self._save_if_due()
            if position.step >= total:
                return
            began = time.perf_counter()
            self._step()
            position.step += 1
            self.scheduler.step()
            position.seconds += time.perf_counter() - began
            self._shown()

    @property
    def _asynchronous(self) -> bool:
        """Whether workers synchronise for evaluations only."""
        return hasattr(self.run.rule.schedule, "staleness") and self.run.world.size > 1

    # -- a step -----------------------------------------------------------------------------------

    def _step(self) -> None:
        self.pair.train()
        step = self.position.step
        loss = self._labelled(step)
        share = self.course.labelled_share(step)
        if step >= self.course.warm and self.method is not None:
            loss = share * loss + (1 - share) * self._unlabelled(step)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for model in self.pair.models:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.course.loop.clip)
        self.optimizer.step()
        self._log(loss.detach())

    def _labelled(self, step: int) -> Tensor:
        x, y = self.loaders["labelled"].next(self.pair.device)
        found = supervised_loss(x, y, self.pair, self.duality.at(step))
        return found.loss_forward + found.loss_backward

    def _unlabelled(self, step: int) -> Tensor:
        """The loss of an unlabelled batch; directions take turns."""
        assert self.method is not None
        name = self.directions[(step - self.course.warm) % len(self.directions)]
        samples = self.loaders[name].next(self.pair.device)
        found = self.method.learn(samples, self.pair.direction(name), self.position.generator)
        if found.rewards is not None:
            self.position.reward(name, found.rewards)
        return found.loss

    def _log(self, loss: Tensor) -> None:
        self._losses.append(loss)
        if len(self._losses) == LOG_EVERY:
            self.run.log(loss=float(torch.stack(self._losses).mean()))
            self._losses.clear()

    def _shown(self) -> None:
        position, course = self.position, self.course
        what = "warm-up" if position.step <= course.warm else course.method.replace("_", " ")
        rate = position.step / max(position.seconds, 1e-9)
        self.show.doing(what, position.step, course.total, f"{rate:,.1f} steps/s")

    # -- evaluation --------------------------------------------------------------------------------

    def _look_if_due(self) -> None:
        step, course = self.position.step, self.course
        due = step in (0, course.warm, course.total) or step % course.loop.looks.every == 0
        if due and self.position.evaluated != step:
            with self.run.global_model():
                self.position.rows.append(self._row())
            self.position.evaluated = step
            self.position.sums.zero_()
            self._write_history()

    def _row(self) -> dict[str, Any]:
        position, run, course = self.position, self.run, self.course
        sums = evaluation.look(self.pair, self.heldout, course.loop.looks, (run.world.rank, run.world.size))
        rewards = workers.add_up(run, position.sums.clone())
        row = evaluation.row_of(position.step, workers.add_up(run, sums), rewards)
        phase = "warm" if position.step <= course.warm else course.method
        row |= {"phase": phase, "seconds": round(position.seconds, 3)}
        row["labelled_share"] = course.labelled_share(position.step)
        row["rates"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        row["translations"] = []
        run.log(forward=row["forward"], backward=row["backward"], gap=row["gap"])
        if run.world.rank == 0:
            row["translations"] = evaluation.translations(
                self.pair, self.heldout, course.loop.looks, course.reward.alpha
            )
        self.show.row(row)
        return row

    def _begin_method(self) -> None:
        if self.method is not None and self.position.step == self.course.warm:
            evaluation.check_warm(self.position.rows[-1], self.course.warm)
            with self.run.global_model():
                self.method.begin(self.pair)

    # -- on disk ----------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        """Save all workers' states; keep the newest `KEEP`."""
        step, course = self.position.step, self.course
        if self._asynchronous:
            due = self.position.evaluated == step and step > 0
        else:
            due = step > 0 and (step % course.loop.save_every == 0 or step in (course.warm, course.total))
        if not due or self.position.saved == step:
            return
        folder = self.folder / STATE
        self.position.saved = step
        self.run.save(folder / f"step-{step:09d}")
        if self.run.world.rank == 0:
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)

    def _write_history(self, over: bool = False) -> None:
        if self.run.world.rank:
            return
        run, course = self.run, self.course
        about = {"workers": run.world.size, "rule": run.rule.text(), "bytes_sent": run.bytes_sent}
        about |= {"method": course.method, "warm": course.warm, "steps": course.total, "over": over}
        files.write_text(self.folder / HISTORY, json.dumps({**about, "rows": self.position.rows}, indent=1) + "\n")
