# SPDX-License-Identifier: Apache-2.0
"""A script under virtual workers: what it takes for its own process's is its own, and who fails is named."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.forecast.sim import program
from paceline.forecast.sim.process_isolation import shared_process

Write = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_LOG", "PACELINE_RULE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "out").mkdir()

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def run(path: Path, *arguments: object, workers: int = 3, hosts: int = 1) -> int:
    """The body of the command's process, here; its exit code."""
    sys.path.insert(0, "")  # as `python -m` does
    return program.main([str(workers), str(hosts), "out", "as-is", str(path), *map(str, arguments)])


def printed(rank: int, suffix: str = "out") -> list[str]:
    path = Path("out") / f"rank-{rank:03d}.{suffix}"
    return path.read_text().splitlines() if path.is_file() else []


def test_each_worker_prints_to_its_own_place(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("""
        import argparse, logging, os, sys
        from paceline.communication import virtual

        logging.basicConfig(level=logging.INFO, format="%(message)s")

        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float)
            lr = parser.parse_args().lr
            virtual.current().barrier()
            print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], lr)
            logging.info("worker %s logs", os.environ["RANK"])

        if __name__ == "__main__":
            main()
    """)
    assert run(path, "--lr", 0.5) == 0
    assert "0 3 0 0.5" in capsys.readouterr().out.splitlines()
    assert [printed(rank) for rank in (1, 2)] == [["1 3 0 0.5"], ["2 3 0 0.5"]]


def test_logging_of_a_worker_goes_to_its_own_file(script: Write) -> None:
    path = script("""
        import logging, os
        from paceline.communication import virtual

        logger = logging.getLogger("a program of the tests")
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
        virtual.current().barrier()
        logger.warning("from %s", os.environ["RANK"])
    """)
    assert run(path) == 0
    assert [printed(rank, "err") for rank in (1, 2)] == [["from 1"], ["from 2"]]


def test_the_working_directory_and_streams_move_with_the_baton(script: Write, tmp_path: Path) -> None:
    path = script("""
        import io, os, sys
        from pathlib import Path
        from paceline.communication import virtual

        rank = os.environ["RANK"]
        os.mkdir(f"of-{rank}")
        os.chdir(f"of-{rank}")
        sys.stderr = io.StringIO()
        virtual.current().barrier()
        print("said by", rank, file=sys.stderr)
        Path("said").write_text(sys.stderr.getvalue())
    """)
    before = os.getcwd(), sys.stderr
    assert run(path) == 0
    assert (os.getcwd(), sys.stderr) == before
    assert [(tmp_path / f"of-{rank}" / "said").read_text() for rank in range(3)] == [f"said by {k}\n" for k in range(3)]
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("signal.signal(signal.SIGALRM, print)", "virtual worker 0 sets a handler for SIGALRM"),
        ("torch.distributed.init_process_group('gloo')", "virtual worker 0 calls torch.distributed.init_process_group"),
    ],
)
def test_what_cannot_be_a_workers_own_is_refused(
    script: Write, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    assert run(script(f"import signal, torch.distributed\n{line}\n")) == 1
    assert says in capsys.readouterr().err


def test_an_exchange_inside_an_import_is_refused(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The module is locked while it is imported: the next worker would wait for ever."""
    script("from paceline.communication import virtual\nvirtual.current().barrier()\n", "trains_at_import_9.py")
    assert run(script("import trains_at_import_9\n")) == 1
    assert "while the module trains_at_import_9 is being imported" in capsys.readouterr().err


def test_the_worker_that_fails_is_named(script: Write) -> None:
    path = script("""
        import os
        from paceline.communication import virtual

        virtual.current().barrier()
        if os.environ["RANK"] == "1":
            raise ValueError("the second is odd")
        virtual.current().barrier()
    """)
    assert run(path) == 1
    assert Path("out/failed").read_text() == "1\n"
    lines = printed(1, "err")
    assert lines[0].startswith("Traceback") and str(path) in lines[1] and lines[-1] == "ValueError: the second is odd"
    assert printed(2, "err") == []  # what the others say of it is no news


def test_nothing_is_changed_for_threads_that_are_no_workers() -> None:
    before = signal.signal, signal.getsignal(signal.SIGUSR2)
    with shared_process():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        signal.signal(signal.SIGUSR2, before[1])
    assert signal.signal is before[0]
