# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not at all, and refused when they are damaged or belong elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.checkpoint import files
from paceline.core.disk import LocalDisk
from paceline.errors import CheckpointError
from tests.helpers import Place, Program, adam, attached, follow, same_bits, simulate, state_of, train

RULE = "bmuf_adam(period=3)"


def saved(path: Path, workers: int = 2, **choices: Any) -> Path:
    train(RULE, workers, optimizer=adam, save_at=4, save_to=path, stop_at=4, **choices)
    return path


def resume(path: Path, workers: int = 2, rule: str = RULE, **choices: Any) -> Any:
    return simulate(Program(rule, optimizer=adam, resume=path, **choices), workers)


def test_what_is_in_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    names = sorted(p.name for p in path.iterdir())
    ranks = [n for r in range(2) for n in (f"rank-00{r}.json", f"rank-00{r}.safetensors")]
    assert names == sorted(["manifest.json", "global.safetensors", *ranks])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["size"] == 2 and manifest["rule"] == RULE and manifest["minibatches"] == 4
    assert set(manifest["files"]) == set(names) - {"manifest.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]  # nothing half-made is left


def test_the_global_model_loads_without_us(tmp_path: Path) -> None:
    def note(place: Place) -> None:
        place.extra["global"] = place.run.global_state()

    outs = train(RULE, 2, optimizer=adam, save_at=4, save_to=tmp_path / "c", stop_at=4, after_step=note)
    assert same_bits(load_file(tmp_path / "c" / "global.safetensors"), outs[0].extra["global"])


@pytest.mark.parametrize("name", ["rank-001.safetensors", "rank-000.json"])
def test_a_flipped_byte_is_found_on_all_workers(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "c") / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    seen = []

    def body() -> None:
        with pytest.raises(CheckpointError) as caught:
            resume_here(tmp_path / "c")
        seen.append(str(caught.value))

    simulate(body, 2)
    assert len(seen) == 2 and all(name in text and "damaged" in text and "older checkpoint" in text for text in seen)


def resume_here(path: Path) -> None:
    model = nn.Linear(2, 2)
    run = paceline.attach(model, adam(model.parameters()), RULE)
    try:
        run.resume(path)
    finally:
        run.abandon()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "size": 2, "files": []}', "\udcff"]
)
def test_a_damaged_manifest(text: str, tmp_path: Path) -> None:
    (saved(tmp_path / "c") / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="damaged"):
        resume(tmp_path / "c")


def test_another_format(tmp_path: Path) -> None:
    file = saved(tmp_path / "c") / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2, and this paceline reads 1"):
        resume(tmp_path / "c")


def test_a_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    (path / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        saved(path)
    assert (path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("suffix", [".old", ".partial"])
def test_a_foreign_neighbour_is_never_deleted(suffix: str, tmp_path: Path) -> None:
    saved(tmp_path / "c")
    neighbour = tmp_path / f"c{suffix}"
    neighbour.mkdir()
    (neighbour / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        saved(tmp_path / "c")
    assert (neighbour / "thesis.tex").read_text() == "precious"


def test_what_cannot_be_written_is_an_error_on_all_and_the_old_one_stays(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    class Odd:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {"bad": object() if self.rank == 1 else 0}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    seen = []

    def body() -> None:
        with attached(nn.Linear(2, 2), RULE, adam) as (run, *_):
            with pytest.raises(CheckpointError, match=r"rank 1 .*object, which a checkpoint cannot hold"):
                run.save(path, odd=Odd(run.world.rank))
            seen.append(run.world.rank)

    simulate(body, 2)
    assert sorted(seen) == [0, 1]
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


@pytest.mark.parametrize(("only_old", "kill_at"), [(True, 1), (True, 2), (False, 1), (False, 2), (False, 3)])
def test_killed_while_replacing_something_can_always_be_resumed(
    only_old: bool, kill_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "c")
    if only_old:
        path.rename(tmp_path / "c.old")  # as a first kill between the renames leaves it
    count = 0
    rename, rmtree = LocalDisk.replace, LocalDisk.remove_folder

    class Killed(BaseException):
        pass

    def step(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == kill_at:
            raise Killed
        return action(*args, **kwargs)

    monkeypatch.setattr(LocalDisk, "replace", lambda *a: step(rename, *a))
    monkeypatch.setattr(LocalDisk, "remove_folder", lambda *a: step(rmtree, *a))
    with pytest.raises(Killed):
        resume(path, save_at=6, save_to=path, stop_at=6)
    monkeypatch.undo()
    whole = train(RULE, 2, optimizer=adam)
    assert same_bits(resume(path)[0].model, whole[0].model)


def test_objects_of_the_users_own_are_restored(tmp_path: Path) -> None:
    class Meter:
        def __init__(self) -> None:
            self.seen: dict[Any, Any] = {}

        def state_dict(self) -> dict[Any, Any]:
            return dict(self.seen)

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.seen = state

    meter = Meter()
    meter.seen = {3: torch.ones(2), "t": (1, float("inf"))}
    with attached(nn.Linear(2, 2), "bmuf", adam) as (run, model, _):
        run.save(tmp_path / "c", meter=meter)
    again = Meter()
    with attached(model, "bmuf", adam) as (run, *_):
        run.resume(tmp_path / "c", meter=again)
    assert again.seen["t"] == (1, float("inf")) and torch.equal(again.seen[3], torch.ones(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
)
def test_schedulers_are_restored(make: Callable[[Any], Any], tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, paceline.Run]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, make(optimizer), paceline.attach(model, optimizer, "bmuf")

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> None:
        for _ in range(count):
            follow(optimizer, model(torch.ones(1, 2)).sum())
            scheduler.step()

    model, optimizer, scheduler, run = build()
    steps(model, optimizer, scheduler, 4)
    run.save(tmp_path / "c", scheduler=scheduler)
    steps(model, optimizer, scheduler, 5)
    run.close()
    model2, optimizer2, scheduler2, run2 = build()
    run2.resume(tmp_path / "c", scheduler=scheduler2)
    steps(model2, optimizer2, scheduler2, 5)
    run2.close()
    assert same_bits(state_of(model), state_of(model2))
    assert optimizer.param_groups[0]["lr"] == optimizer2.param_groups[0]["lr"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"\x80", b"PK"))
    assert (
        files.sha256(path / "global.safetensors")
        == json.loads((path / "manifest.json").read_text())["files"]["global.safetensors"]
    )


def test_closed_runs_say_so(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    run = paceline.attach(model, adam(model.parameters()), "bmuf")
    run.close()
    run.close()
    for action in (lambda: run.save(tmp_path / "c"), lambda: run.resume(tmp_path / "c"), lambda: run.share([1])):
        with pytest.raises(paceline.ClosedError, match="attach again"):
            action()


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        resume(tmp_path / "nothing")
