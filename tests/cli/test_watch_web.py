# SPDX-License-Identifier: Apache-2.0
"""`paceline watch --web`: where it listens, whom it lets in, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app

from .test_watch import write


@contextmanager
def watching(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The printed address of the page, and the process that serves it."""
    command = [sys.executable, "-m", "paceline", "watch", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stdout.read()
        yield found[0], process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def read(address: str, host: str = "") -> str:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def until(address: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The news of the page once they are as wanted."""
    end, pause = time.monotonic() + 60, threading.Event()
    while not wanted(news := json.loads(read(f"{address}data?since=0"))):
        assert time.monotonic() < end, news
        pause.wait(0.05)
    return dict(news)


@pytest.mark.processes
def test_it_serves_this_machine_alone_until_ctrl_c(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, closed=rank == 0)
    with watching(tmp_path, "--web", "--port", 0) as (address, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert '<section id="part-head">' in read(address)
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            read(address, "evil.example")
        refused.value.close()
        until(address, lambda news: "tiles" in news["order"])
        write(tmp_path, 1)
        news = until(address, lambda news: news["over"])
        assert "The run is over." in news["status"] and "closed" in news["parts"]["workers-0"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "9"], "add --web"),
        (["--host", "0.0.0.0"], "add --web"),
        (["--web", "--once"], "`paceline report` writes the page"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: list[str], told: str) -> None:
    write(tmp_path, 0, size=1)
    result = CliRunner().invoke(app, ["watch", str(tmp_path), *options])
    assert result.exit_code == 2 and told in result.stderr
