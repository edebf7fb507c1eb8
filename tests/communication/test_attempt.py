# SPDX-License-Identifier: Apache-2.0
"""Workers that were started again meet each other, whatever their predecessors left in the store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.communication.torch import rendezvous
from paceline.errors import PeerLostError
from tests.paths import python_path


def meet(store: dist.Store, size: int, timeout_s: float = 30.0) -> list[int]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: rendezvous.agree(store, rank, size, timeout_s), range(size)))


def test_all_of_an_attempt_have_a_number_that_no_other_has() -> None:
    store = dist.HashStore()
    seen = [meet(store, size) for size in (3, 3, 1, 2, 3)]
    assert all(len(set(numbers)) == 1 for numbers in seen)
    assert len({numbers[0] for numbers in seen}) == 5


def test_tokens_of_dead_workers_are_not_confirmed() -> None:
    """All of the first attempt but rank 0 came, and died before it did; one of them came after its answer."""
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"{rendezvous.PREFIX}/3/says/{rank}", f"dead{rank}")
    numbers: list[int] = []
    first = threading.Thread(target=lambda: numbers.append(rendezvous.agree(store, 0, 3, 30.0)))
    first.start()
    while not store.check([f"{rendezvous.PREFIX}/answer/dead1"]):
        pass
    assert first.is_alive()
    with ThreadPoolExecutor(2) as pool:
        numbers += pool.map(lambda rank: rendezvous.agree(store, rank, 3, 30.0), (1, 2))
    first.join(30.0)
    assert numbers == [1, 1, 1]


def test_missing_workers_are_named() -> None:
    with pytest.raises(PeerLostError, match=r"of 3 workers, 1, 2 did not come within 0\.05 s"):
        rendezvous.agree(dist.HashStore(), 0, 3, 0.05)
    with pytest.raises(PeerLostError, match="worker 0 did not answer"):
        rendezvous.agree(dist.HashStore(), 1, 3, 0.05)


TRAIN = """
    import os, signal, torch, paceline
    torch.set_num_threads(1)

    class Count(dict):
        state_dict = dict.copy
        load_state_dict = dict.update

    def train(checkpoint, dies):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        run = paceline.attach(model, optimizer, "bmuf(period=2)", timeout_s=30)
        count = Count(step=0)
        run.include(count=count)
        if os.path.exists(checkpoint):
            run.resume(checkpoint)
        while count["step"] < 12:
            generator = torch.Generator().manual_seed(1000 * count["step"] + run.world.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            count["step"] += 1
            if count["step"] % 4 == 0:
                run.save(checkpoint)
            if count["step"] == 7 and run.world.rank == 1 and dies:
                os.kill(os.getpid(), signal.SIGKILL)
        run.close()
        return model.weight.detach().double().sum().item().hex()

    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    storm, calm = train("storm", start == "0"), train("calm", False)
    if os.environ["RANK"] == "0":
        print("bits", start, storm == calm)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_starts_a_killed_worker_again_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_DISABLE")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
         "--monitor-interval=0.1", "train.py"],
        cwd=tmp_path, env={**mine, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bits 1 True" in done.stdout.splitlines()
