# SPDX-License-Identifier: Apache-2.0
"""`paceline lightrnn train`: the launcher prepares the text and starts workers; a worker trains."""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import torch

import paceline
from paceline import PacelineError
from paceline.cli.console import refuse
from paceline.cli.workers import run_on_workers
from paceline_lightrnn.building import build
from paceline_lightrnn.commands.progress import Shown, shown
from paceline_lightrnn.commands.report import write_page
from paceline_lightrnn.preparing import await_prepared, prepare
from paceline_lightrnn.settings import Settings
from paceline_lightrnn.training import STATE, has_state, train

SETTINGS, LOGS = "settings.json", "logs"


def is_worker() -> bool:
    """Whether a launcher has started this process as one worker of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this worker prepares the text for all."""
    return int(os.environ.get("RANK", "0")) == 0


def begin(settings: Settings, folder: Path, fresh: bool) -> None:
    """Write the settings into the training's folder, unless it has a training with other settings."""
    path = folder / SETTINGS
    if folder.exists() and not folder.is_dir():
        refuse(f"--out {folder} is a file; give a folder")
    if folder.is_dir() and not path.is_file() and any(folder.iterdir()):
        refuse(f"--out {folder} is not empty and holds no LightRNN training; give another folder")
    if fresh:
        shutil.rmtree(folder / STATE, ignore_errors=True)
    if has_state(folder):
        settings.check(Settings.load(path), folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings.save(path)


def work(folder: Path, settings: Settings, threads: int | None = None) -> None:
    """Train as the only worker, or as one of several."""
    timeout_s = float(os.environ.get("PACELINE_TIMEOUT_S", "600"))
    if threads is not None:
        torch.set_num_threads(threads)
    with shown() as show:
        if is_first():
            data = prepare(settings.source, folder, fixed=has_state(folder), say=_every(show))
        else:
            data = await_prepared(settings.source, folder, timeout_s)
        model = build(settings.shape, data.vocabulary, settings.course.seed).to(_device())
        history = train(model, data, settings.course, folder, show=show)
        if is_first():
            show.say(f"perplexity {history[-1]['perplexity']:.2f}; model: {folder}")
            _page(folder, show)


def launch(folder: Path, settings: Settings, workers: int, rule: str | None) -> int:
    """Prepare the text once, start the workers and wait for them; returns the exit code."""
    _check(rule)
    with shown() as show:
        prepare(settings.source, folder, fixed=has_state(folder), say=_every(show))
    command = [sys.executable, "-u", "-m", "paceline", "lightrnn", "worker", str(folder.resolve())]
    return run_on_workers(command, workers, folder / LOGS, rule)


def _check(rule: str | None) -> None:
    """Refuse an invalid rule before reading a long text."""
    try:
        if rule is not None:
            paceline.rule_from_text(rule)
    except PacelineError as error:
        refuse(f"--rule: {error}")


def _page(folder: Path, show: Shown) -> None:
    """Write the report; without matplotlib only a message."""
    try:
        show.say(f"report: {write_page(folder)}")
    except (PacelineError, OSError) as error:
        show.say(f"no report was written: {error}")


def _every(show: Shown) -> partial[None]:
    """A function that prints progress messages, not too often."""
    return partial(_say, show, [0.0])


def _say(show: Shown, told: list[float], text: str) -> None:
    if not text[-1].isdigit():
        show.say(text)
    elif time.monotonic() - told[0] > 2.0:
        told[0] = time.monotonic()
        show.say(text)


def _device() -> torch.device:
    """The GPU of this worker, where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
