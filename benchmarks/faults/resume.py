# SPDX-License-Identifier: Apache-2.0
"""Two workers that are killed again and again: whether their run ends with the bits of one that was never stopped.

For each synchronous recipe, two processes train a small net (momentum or Adam, dropout, batch norm, a scheduler) with
`attach(..., checkpoint=DIR)`. SIGKILL comes at random: behind a random number of minibatches and then a random moment,
for one of the two first. They are started again, call `run.resume()`, and so on; the last start of each run may end.

    python benchmarks/faults/resume.py [--points 50] [--recipes sync "bmuf(period=3)"] [--seed 0] [--directory DIR]

The last line is a JSON object: `points` (kills a recipe), `recipes`, `kills`, `resumed` (starts that found a step),
`runs`, `differing` (runs of which any worker's final model, or its global model, has other bits).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

WORKERS, KILLS, STEPS, DEADLINE_S = 2, 5, 42, 120.0
RECIPES: dict[str, str] = {
    "sync": "sgd",
    "sync(reproducible=True)": "adam",
    "sync(codec='int8')": "sgd",
    "one_bit(warmup=2)": "sgd",
    "one_bit_adam(warmup=7)": "adam",
    "power(rank=1, warmup=2)": "sgd",
    "top_k(ratio=0.2, warmup=0)": "sgd",
    "averaging(period=3)": "adam",
    "averaging(period=3, warmup=4)": "sgd",
    "averaging(period=3, overlap=2, codec='one_bit')": "sgd",
    "bmuf(period=3)": "sgd",
    "bmuf(period=3, nesterov=False, ramp=2)": "sgd",
    "bmuf(period=4, overlap=3, fragments=2)": "sgd",
    "bmuf_adam(period=3)": "adam",
    "bmuf_adam(period=3, warmup=4, overlap=1)": "adam",
    "diloco(period=3)": "adam",
    "diloco(period=3, overlap=3)": "adam",
    "streaming_diloco(period=3, fragments=2)": "adam",
}


# -- a worker ---------------------------------------------------------------------------------------------------------


def train(rule: str, steps: Path | None, out: Path, progress: int) -> None:
    """The program: a loop as people write it. A byte goes to `progress` for every minibatch; "r" says that it resumed.

    Args:
        rule: of the run.
        steps: where steps are kept; None for a run that keeps none.
        out: folder for the final models.
        progress: a pipe.
    """
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    made: Any = torch.optim.Adam if RECIPES.get(rule) == "adam" else torch.optim.SGD
    optimizer = made(model.parameters(), lr=0.02, **({} if made is torch.optim.Adam else {"momentum": 0.9}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    g = torch.Generator().manual_seed(11)
    data = TensorDataset(torch.randn(56, 6, generator=g), torch.randint(3, (56,), generator=g))
    loader = DataLoader(data, 4, shuffle=True)
    run = paceline.attach(model, optimizer, rule, timeout_s=60, checkpoint=steps, every_blocks=1, keep=2)
    torch.manual_seed(100 + run.world.rank)  # dropout differs from worker to worker
    if steps is not None and run.resume(scheduler=scheduler):
        os.write(progress, b"r")
    shared = run.share(loader)
    for _ in range(run.epoch, STEPS * WORKERS * 4 // 56):
        for x, y in shared:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            os.write(progress, b".")
    run.close()
    final = {f"model.{k}": v for k, v in model.state_dict().items()} | {
        f"global.{k}": v for k, v in run.model_for_export().state_dict().items()
    }
    save_file({k: v.clone() for k, v in final.items()}, out / f"{run.world.rank}.safetensors")


def worker(rank: int, port: int, progress: int, arguments: tuple[str, Path | None, Path]) -> None:
    """The life of a forked process."""
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), LOCAL_RANK=str(rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        train(*arguments, progress)
        code = 0
    except paceline.PeerLostError:
        code = 2  # the other one was killed
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- the hand that kills ----------------------------------------------------------------------------------------------


class Pair:
    """Two workers, forked from this process, which has imported everything and started no thread."""

    def __init__(self, rule: str, steps: Path | None, out: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.processes: list[int] = []
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        for rank in range(WORKERS):
            self.processes.append(os.fork())
            if self.processes[-1] == 0:
                worker(rank, port, end, (rule, steps, out))
        os.close(end)
        self.made = self.resumed = 0

    def look(self) -> bool:
        """Take what they say; whether any of them lives."""
        try:
            said = os.read(self._pipe, 65536)
        except BlockingIOError:
            return True
        self.made += said.count(b".")
        self.resumed += said.count(b"r")
        return bool(said)

    def until(self, made: int) -> bool:
        """Wait for so many minibatches of both together; False where they ended before."""
        deadline = time.monotonic() + DEADLINE_S
        while self.made < made:
            if not self.look():
                return False
            if time.monotonic() > deadline:
                raise SystemExit(f"the workers made {self.made} minibatches in {DEADLINE_S:g} s and then no more")
            time.sleep(0.002)
        return True

    def kill(self, dice: random.Random) -> None:
        """One, and the other a moment later."""
        for process in dice.sample(self.processes, WORKERS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            time.sleep(dice.choice([0.0, 0.0, 0.02]))

    def end(self) -> list[int]:
        """Their exit codes."""
        while self.look():
            time.sleep(0.002)
        os.close(self._pipe)
        return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in self.processes]


def whole(rule: str, folder: Path) -> None:
    """A run that is never stopped, and keeps no steps."""
    folder.mkdir()
    pair = Pair(rule, None, folder)
    if pair.end() != [0] * WORKERS:
        raise SystemExit(f"{rule}: the run that nobody kills failed; see above")


def killed(rule: str, folder: Path, kills: int, dice: random.Random) -> tuple[int, int]:
    """A run that is killed up to so many times, and then ends; the kills, and the starts that found a step."""
    folder.mkdir()
    done = resumed = 0
    for number in range(kills + 1):
        pair = Pair(rule, folder / "steps", folder)
        if number < kills and pair.until(dice.randint(1, 2 * STEPS // kills + 4)):
            time.sleep(dice.uniform(0, 0.05))
            pair.kill(dice)
            done += 1
        codes = pair.end()
        resumed += pair.resumed == WORKERS
        if any(code not in (0, 2, -signal.SIGKILL) for code in codes):
            raise SystemExit(f"{rule}: a worker failed, exit codes {codes}; see above")
        if codes == [0] * WORKERS:
            return done, resumed
    raise SystemExit(f"{rule}: the last start did not end well")


def same(one: Path, other: Path) -> bool:
    """Whether all workers ended with the same bits."""
    for rank in range(WORKERS):
        a, b = (load_file(folder / f"{rank}.safetensors") for folder in (one, other))
        if a.keys() != b.keys() or any(a[k].numpy().tobytes() != b[k].numpy().tobytes() for k in a):
            return False
    return True


def prove(rule: str, points: int, folder: Path, dice: random.Random) -> dict[str, int]:
    """So many kills under one recipe."""
    folder.mkdir(parents=True)
    whole(rule, folder / "whole")
    found = {"kills": 0, "resumed": 0, "runs": 0, "differing": 0}
    while found["kills"] < points:
        at = folder / f"run{found['runs']}"
        kills, resumed = killed(rule, at, min(KILLS, points - found["kills"]), dice)
        found["kills"] += kills
        found["resumed"] += resumed
        found["runs"] += 1
        found["differing"] += not same(folder / "whole", at)
        shutil.rmtree(at)
    return found


def main() -> None:
    """All recipes, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    chosen = _quick.parse(parser, points=1, recipes=["bmuf(period=3)"])
    importlib.import_module("torch._dynamo")  # the first step of an optimizer would, in every process anew
    dice = random.Random(chosen.seed)
    totals = {"kills": 0, "resumed": 0, "runs": 0, "differing": 0}
    with tempfile.TemporaryDirectory(dir=chosen.directory, prefix="paceline-resume-") as folder:
        for number, rule in enumerate(chosen.recipes):
            began = time.monotonic()
            found = prove(rule, chosen.points, Path(folder) / str(number), dice)
            totals = {key: totals[key] + value for key, value in found.items()}
            print(f"{rule:48} {found}  {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps({"points": chosen.points, "recipes": len(chosen.recipes), **totals}))


if __name__ == "__main__":
    main()
