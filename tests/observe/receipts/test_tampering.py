# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to receipts after they were written is found, and said in a sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from operator import setitem
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.communication.sockets.certificates import Authority
from paceline_plugins.receipts import seal
from paceline_plugins.receipts.audit import audit, find
from paceline_plugins.receipts.verify_command.again import first_difference, other_machine
from tests.observe.receipts.written import Line, forge, lines_of, put, write

Tamper = Callable[[Path], object]
Change = Callable[[list[Line]], object]
CHAIN = "rank-001.jsonl"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Authority]:
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        return folder, write(patch, folder)


@pytest.fixture
def run(original: tuple[Path, Authority], tmp_path: Path) -> Path:
    return Path(shutil.copytree(original[0], tmp_path / "run"))


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "400"})


def test_an_honest_run_is_shown_to_be_right(run: Path) -> None:
    for place in (run, run / "receipts"):
        said = verify(place)
        assert said.exit_code == 0, said.output
        assert "3 chains, sealed by the authority" in said.output
        assert "4 merges (exchanges 1 to 6); all workers held one model after each" in said.output
        assert said.output.count("40 places of 40 places, each exactly once") == 2


def lines(change: Change) -> Tamper:
    """A change of worker 1's lines."""

    def tamper(folder: Path) -> None:
        found = lines_of(folder, 1)
        change(found)
        put(folder, 1, found)

    return tamper


def forged(change: Change) -> Tamper:
    """A change of worker 1's lines, with hashes that fit."""
    return lambda folder: forge(folder, 1, change)


def written(change: Callable[[bytes], bytes]) -> Tamper:
    """Worker 1's file, changed as bytes."""
    return lambda folder: (folder / CHAIN).write_bytes(change((folder / CHAIN).read_bytes()))


def alter_seal(folder: Path) -> None:
    found = json.loads((folder / "seal-0.json").read_text())
    found["chains"]["1"][0] -= 1
    (folder / "seal-0.json").write_text(json.dumps(found))


TAMPERS: dict[str, Tamper] = {
    "alter": lines(lambda found: found[2].update(steps=found[2]["steps"] + 1)),
    "alter places": lines(lambda found: setitem(found[2]["places"][0][3], 0, [0, 2])),
    "alter last": lines(lambda found: found[-1].update(unknown=1)),
    "drop": lines(lambda found: found.pop(2)),
    "drop first": lines(lambda found: found.pop(0)),
    "swap": lines(lambda found: found.insert(2, found.pop(3))),
    "repeat": lines(lambda found: found.insert(3, found[2])),
    "cut tail": lines(lambda found: (found.pop(), found.pop())),
    "cut within": written(lambda data: data[:-10]),
    "empty": lines(lambda found: found.clear()),
    "add": forged(lambda found: found.append(dict(found[-1]))),
    "rewrite": forged(lambda found: found[1].update(given="0" * 64)),
    "another worker's": lambda folder: shutil.copy(folder / "rank-000.jsonl", folder / CHAIN),
    "alter seal": alter_seal,
    "no json": written(lambda data: b"\xff\x00{\n"),
    "deep": written(lambda data: b"[" * 100_000 + b"\n"),
    "huge": forged(lambda found: found[0].update(size=1 << 60)),
    "a gap": lines(lambda found: found.insert(2, {"kind": "gap", "events": 3})),
}


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        ("alter", "rank-001.jsonl, line 4: line 3 was altered after it was written"),
        ("alter places", "rank-001.jsonl, line 4: line 3 was altered after it was written"),
        ("alter last", "rank-001.jsonl: the chain that was sealed is another one, for its last hash differs"),
        ("drop", "rank-001.jsonl, line 3: it was line 4: lines were removed, moved or put in"),
        ("drop first", "rank-001.jsonl, line 1: it was line 2: lines were removed, moved or put in"),
        ("swap", "rank-001.jsonl, line 3: it was line 4: lines were removed, moved or put in"),
        ("repeat", "rank-001.jsonl, line 4: it was line 3: lines were removed, moved or put in"),
        ("cut tail", "rank-001.jsonl ends with line 4, and 6 were sealed: its tail was cut off"),
        ("cut within", "rank-001.jsonl ends within a line: its worker was killed, or the file was cut"),
        ("empty", "rank-001.jsonl ends with line 0, and 6 were sealed: its tail was cut off"),
        ("add", "rank-001.jsonl has 7 lines, and 6 were sealed: lines were added later"),
        ("rewrite", "rank-001.jsonl: the chain that was sealed is another one"),
        ("another worker's", "rank-001.jsonl: the chain that was sealed is another one"),
        ("alter seal", "seal-0.json was altered after it was signed: the signature does not fit it"),
        ("no json", "rank-001.jsonl, line 1: it is no receipt"),
        ("deep", "rank-001.jsonl, line 1: it is no receipt"),
        ("huge", "rank-001.jsonl, line 1: it is no receipt of this version"),
        ("a gap", "rank-001.jsonl, line 3: 3 receipts are missing before it, since the disk was full"),
    ],
)
def test_what_is_done_to_the_files_is_found(run: Path, tamper: str, says: str) -> None:
    TAMPERS[tamper](run / "receipts")
    said = verify(run)
    assert said.exit_code == 1, said.output
    assert f"wrong: {says}" in said.output


@pytest.mark.parametrize(
    "name", ["rank-0000.jsonl", "rank-0.jsonl", "rank-\u0660.jsonl", "Rank-000.jsonl", "rank-000.txt"]
)
def test_a_chain_has_one_name(run: Path, name: str) -> None:
    """The genuine chain under another name, and a forged one at its place: another reader would take the forged one."""
    folder = run / "receipts"
    shutil.copy(folder / "rank-000.jsonl", folder / name)
    said = verify(run)
    assert said.exit_code == 1 and f"wrong: {name} is neither a chain nor a seal" in said.output, said.output
    forge(folder, 0, lambda lines: lines[1].update(given="0" * 64))
    assert "rank-000.jsonl: the chain that was sealed is another one" in verify(run).output


@pytest.mark.parametrize("name", ["seal-00.json", "seal-0 (copy).json", "seal.json", "seal-0.json.bak"])
def test_a_seal_has_one_name(run: Path, name: str) -> None:
    shutil.copy(run / "receipts" / "seal-0.json", run / "receipts" / name)
    said = verify(run)
    assert said.exit_code == 1 and f"wrong: {name} is neither a chain nor a seal" in said.output, said.output


VALUES: list[Any] = [None, True, -1, 1 << 70, 1.5, "", [], {}, [[]], {"a": 1}, [[0, 0, -5, [[-3, 4]], 0, 2]], {"0": 7}]


def places_in(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all parts of a line."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*way, key)
        yield from places_in(value[key], (*way, key))


def test_any_content_has_an_answer(run: Path) -> None:
    """Values of other kinds, in chains whose hashes fit: a sentence, and no traceback."""
    draw, kept = random.Random(0), run / "receipts"
    (kept / "seal-0.json").unlink()

    def spoil(lines: list[Line]) -> None:
        line = draw.choice(lines)
        *way, last = draw.choice(list(places_in(line)))
        part: Any = line
        for key in way:
            part = part[key]
        part[last] = draw.choice(VALUES)

    honest = find(kept)
    for trial in range(60):
        spoilt = Path(shutil.copytree(kept, run / f"trial-{trial}"))
        forge(spoilt, 1, spoil)
        found = find(spoilt)
        assert audit(spoilt, found).code in (1, 2)
        if not any(one.problems for one in found):
            first_difference(found, honest, 4)
            other_machine(found, honest)


def other_job(folder: Path) -> tuple[Path, Authority]:
    with pytest.MonkeyPatch.context() as patch:
        return folder, write(patch, folder)


def test_the_chain_of_another_job_is_found(run: Path, tmp_path: Path) -> None:
    other, _ = other_job(tmp_path / "other")
    shutil.copy(other / "receipts" / "rank-001.jsonl", run / "receipts")
    said = verify(run)
    assert said.exit_code == 1 and "wrong: rank-001.jsonl is of job " in said.output, said.output
    assert "it is another run's" in said.output


def test_a_seal_of_another_key_is_found(run: Path) -> None:
    (run / "authority.pem").unlink()  # the chains name their authority themselves
    seal.write(run / "receipts", Authority.new(), 0, range(3))
    said = verify(run)
    assert said.exit_code == 1 and "wrong: seal-0.json is signed with another key" in said.output, said.output


def test_a_whole_forgery_is_found_with_a_copy_of_the_certificate(
    run: Path, original: tuple[Path, Authority], tmp_path: Path
) -> None:
    forger = Authority.new()

    def change(lines: list[Line]) -> None:
        lines[0] |= {"job": forger.job, "authority": seal.fingerprint(forger.certificate)}

    for rank in range(3):
        forge(run / "receipts", rank, change)
    seal.write(run / "receipts", forger, 0, range(3))
    (run / "authority.pem").write_text(seal.pem(forger.certificate))
    assert verify(run).exit_code == 0  # nothing in the folder contradicts it
    said = verify(run, "--authority", original[0] / "authority.pem")
    assert said.exit_code == 1 and "wrong: seal-0.json is signed with another key" in said.output, said.output


def change_and_seal(run: Path, authority: Authority, change: Change) -> Result:
    """Change the chain of worker 1 as its own author could."""
    forge(run / "receipts", 1, change)
    seal.write(run / "receipts", authority, 0, range(3))
    return verify(run)


def test_a_sample_that_counts_twice_is_found(run: Path, original: tuple[Path, Authority]) -> None:
    said = change_and_seal(run, original[1], lambda found: setitem(found[1]["places"][0][3], 0, [0, 2]))  # worker 0's
    assert said.exit_code == 1, said.output
    assert "pass 0: places 0 to 1 came twice, in exchange 1 by worker 0 and in exchange 1 by worker 1" in said.output
    assert "pass 0: 2 places of 40 places never came, though a later pass began" in said.output


def test_a_place_beyond_the_pass_is_found(run: Path, original: tuple[Path, Authority]) -> None:
    said = change_and_seal(run, original[1], lambda found: found[1]["places"][0][3].append([40, 41]))
    assert said.exit_code == 1 and "pass 0: place 40 came, and the pass has 40 places" in said.output, said.output


def test_a_worker_with_another_model_is_found(run: Path, original: tuple[Path, Authority]) -> None:
    said = change_and_seal(run, original[1], lambda found: found[3].update(model="0" * 64))
    assert said.exit_code == 1, said.output
    assert "after exchange 4 worker 1 had another model than the others" in said.output


def test_workers_that_began_differently_are_found(run: Path, original: tuple[Path, Authority]) -> None:
    said = change_and_seal(run, original[1], lambda found: found[0]["settings"].update(seed=7))
    assert said.exit_code == 1 and "workers 0 and 1 began with different settings" in said.output, said.output


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("seal-0.json", "no seal covers the chain of worker 0, 1, 2: anyone could have written it"),
        ("rank-002.jsonl", "seal-0.json covers worker 2, and rank-002.jsonl is not here: copy it from there"),
    ],
)
def test_what_is_missing_leaves_it_open(run: Path, missing: str, says: str) -> None:
    (run / "receipts" / missing).unlink()
    said = verify(run)
    assert said.exit_code == 2 and f"not told: {says}" in said.output, said.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere holds no receipts"),
        (["logs"], "logs holds no receipts (looked for logs/receipts/rank-000.jsonl): begin a run with --receipts"),
        (["RUN", "--block", "2"], "--block makes an exchange again, and needs the program"),
        (["RUN", "train.py"], "PROGRAM is for a block that is made again: give --block N with it"),
        (["RUN", "--checkpoint", "steps"], "--checkpoint is for a block that is made again"),
        (["RUN", "--from-start"], "--from-start is for a block that is made again"),
        (["RUN", "--block", "2", "--from-start", "--checkpoint", "steps", "train.py"], "give one of them"),
        (["RUN", "--block", "9", "train.py"], "--block 9: the receipts have merges from exchange 1 to 6; the nearest"),
        (["RUN", "--block=0", "train.py"], "merges from exchange 1 to 6; the nearest are 1, 3"),
        (["--block", "4", "RUN", "nowhere.py"], "the program nowhere.py does not exist"),
        (["RUN", "--authority", "nowhere.pem"], "nowhere.pem is no certificate of a run's authority"),
        (["RUN", "--authority", "RUN/receipts/seal-0.json"], "is no certificate of a run's authority"),
        (["RUN", "train.py", "--block", "2"], "--block after the program train.py"),
    ],
)
def test_calls_that_cannot_be_served(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(run.parent)
    Path("train.py").write_text("")
    Path("logs").mkdir()
    Path("logs/rank-000.jsonl").write_text('{"kind": "attach", "at_s": 0.1, "rank": 0, "size": 1}\n')
    said = verify(*(one.replace("RUN", "run") for one in arguments))
    assert said.exit_code == 2 and says in " ".join(said.output.replace("│", "").split()), said.output
