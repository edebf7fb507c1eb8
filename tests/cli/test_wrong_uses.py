# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the commands: each is refused in at most three lines, with the cause, the value and what to do."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app

pytestmark = pytest.mark.plugins

COLUMNS, MOST_LINES = 100, 3
PROGRAMS = {
    "ok.py": "import paceline\npaceline.attach\nprint('never')\n",
    "bare.py": "import torch\n",
    "deep.py": "import torch, deepspeed\n",
    "wrong.py": "import torch\n\ndef f(:\n",
    "binary.py": "import torch\0",
    "text": "echo hello world\n",
    "tool": "#!/bin/sh\n",
    "taken/rank-000.jsonl": "{}",
    "steps/step-000000100/x": "",
}

TABLE = """
run                                       | no program was given | paceline run [OPTIONS] PROGRAM
run nothing.py                            | nothing.py does not exist | looked in
run .                                     | is not a file | looked in
run wrong.py                              | not valid Python | line 3: invalid syntax: def f(:) | correct it
run binary.py                             | not valid Python | null bytes | correct it
run text                                  | neither Python (line 1: invalid syntax | give one of these
run tool                                  | tool may not be executed | chmod +x tool
run -m no.such.module                     | there is no module no.such.module | 'no' is missing
run ok.py --workers 2                     | --workers after the program ok.py | run --workers 2 ok.py (paceline's)
run --worker 2 ok.py                      | No such option: --worker | --workers
run --workers 0 ok.py                     | --workers must be at least 1, got 0
run --workers two ok.py                   | '--workers': | a valid integer | got 'two'
run --rule bmuf(periode=4) ok.py          | --rule | did you mean 'period'
run --rule bmuff ok.py                    | there is no rule 'bmuff' | did you mean 'bmuf'
run --rule bmuf(period=0) ok.py           | period must be a whole number of minibatches, at least 1, got 0
run --rule "bmuf(codec='int7')" ok.py     | 'int7' | did you mean 'int8'
run --rule "__import__('os')" ok.py       | --rule | need names
run --hosts 0 ok.py                       | --hosts must be at least 1, got 0
run --hosts 2 ok.py                       | --hosts 2 needs --master HOST:PORT
run --hosts 2 --master node0 ok.py        | HOST:PORT such as node0:29500 | got 'node0'
run --hosts 2 --master node0:99999 ok.py  | HOST:PORT such as node0:29500 | got 'node0:99999'
run --hosts 2 --master 127.0.0.1:TAKEN ok.py | port TAKEN is in use | choose a free one
run --hosts 2 --master no.such.invalid:2000 ok.py | this host does not know no.such.invalid
run --host-index 1 ok.py                  | --host-index must lie in 0..0 | got 1
run --timeout 0 ok.py                     | --timeout must be at least 1 second, got 0.0
run --tls nowhere ok.py                   | --tls: no cert.pem, key.pem, ca.pem in nowhere
run --tls a --open ok.py                  | --tls and --open exclude each other | give one of them
run --log taken ok.py                     | taken already holds a run | add --overwrite
run --log /proc/none ok.py                | --log /proc/none is not writable | give another directory
run --elastic 1:1 --log /dev/null/x ok.py | --log /dev/null/x is not writable | give another directory
sim --log ok.py/below ok.py               | --log ok.py/below is not writable | give another directory
tune --search lr=log(1e-3,1) --log /proc/none ok.py | --log /proc/none is not writable
run --log ok.py ok.py                     | --log ok.py is a file | give a directory
run --restarts -1 ok.py                   | --restarts must be at least 0, got -1
run --transport carrier ok.py             | --transport must be one of auto, channel | got 'carrier'
run --metrics TAKEN ok.py                 | 127.0.0.1:TAKEN cannot be used | give another port
run --metrics nine ok.py                  | --metrics must be PORT or HOST:PORT such as 9400 | got 'nine'
run --checkpoint-every 5 ok.py            | --checkpoint-every belongs to --checkpoint PLACE | give both
run --checkpoint-every 0 --checkpoint c ok.py | '--checkpoint-every': | 1, got '0'
run --checkpoint steps bare.py            | steps holds step-000000100 of an earlier run | give another place
run --checkpoint c --restarts 1 bare.py   | --restarts starts an unchanged program at its beginning | run.resume
run --checkpoint "" ok.py                 | --checkpoint was given nothing | name a place
run --tensorboard ok.py/x ok.py           | --tensorboard ok.py/x cannot be written
run --random-data ok.py                   | ok.py attaches paceline itself
run --random-data deep.py                 | deep.py uses deepspeed, which makes a cluster itself
run --workers 2 deep.py                   | deep.py uses deepspeed | 2 workers would do the whole job each | --as-is
run --as-is --random-data bare.py         | --random-data is for programs that run with zero lines | leave out --as-is
run --force-zero-lines ok.py              | --force-zero-lines is for programs without paceline
run --elastic 8:2 ok.py                   | --elastic must be MIN:MAX with 1 <= MIN <= MAX, got 8:2
run --elastic x ok.py                     | --elastic must be MIN:MAX such as 2:8 | got 'x'
run --elastic 2:8 --hosts 2 ok.py         | --hosts is for runs of a fixed size | --join HOST:PORT
run --elastic 2:8 --restarts 2 ok.py      | --restarts starts all workers again | leave it out
run --elastic 2:8 --rule asgd ok.py       | asgd is asynchronous: its workers survive
run --elastic 2:8 --rule sync ok.py       | sync | use --restarts N
run --elastic 2:8 --workers 9 ok.py       | --workers 9 is more than the 8
run --elastic 2:8 --grace 700 ok.py       | --grace must lie above 0 and below --timeout (600 s), got 700
run --elastic 2:8 --listen 0.0.0.0:1 ok.py | --listen takes one address of this host
run --elastic 2:8 --receipts ok.py        | --receipts is for runs of a fixed size | leave it out
run --elastic 2:8 --join a:1 ok.py        | give one of them
run --elastic 1:2 bare.py                 | bare.py does not attach paceline, and with --elastic it has to | run.share
run --elastic 1:2 --random-data bare.py   | --random-data is not for --elastic
run --join a:1 --listen b:1 ok.py         | --listen belongs to the launcher that is joined
run --grace 5 ok.py                       | --grace belongs to --elastic MIN:MAX
run --again nowhere ok.py                 | --again takes all other options | leave out script
sim --workers 0 ok.py                     | --workers must lie in 1..4096, got 0
sim --workers 4 --hosts 5 ok.py           | --hosts must lie in 1..4 with --workers 4, got 5
sim --rule bmuff ok.py                    | --rule | there is no rule 'bmuff' | did you mean 'bmuf'
sim nothing.py                            | the program nothing.py does not exist
explain bmf                               | there is no rule 'bmf' | did you mean 'bmuf'
explain "bmuf("                           | cannot read the rule 'bmuf(' | write it like
explain bmuf --workers 0                  | --workers must be at least 1, got 0
explain bmuf --parameters many            | --parameters must be a number such as 250000, 25M or 1.3B, got 'many'
watch nowhere --once                      | nowhere does not exist | give the log directory
watch ok.py --once                        | ok.py is a file | give the log directory
watch --web --once                        | --once is of the view in the terminal
watch --port 80                           | --port and --host are of the page | add --web
nothing                                   | No such command 'nothing'
"""
ROWS = [tuple(part.strip() for part in row.split(" | ")) for row in TABLE.strip().splitlines()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for name, text in PROGRAMS.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def refused(line: str) -> str:
    """The message with which a command is refused, in one line."""
    result: Result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (line, result.output)
    lines = [one.strip("│ ") for one in result.stderr.splitlines() if one.startswith(("│", "Error: "))]
    assert 1 <= len(lines) <= MOST_LINES, (line, result.stderr)
    assert "never" not in result.output and not Path("paceline-logs").exists()
    return " ".join(lines)


@pytest.mark.parametrize("part", range(4))
def test_each_names_the_cause_the_value_and_the_remedy(part: int) -> None:
    assert len({line for line, *_ in ROWS}) >= 60
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for line, *says in ROWS[part::4]:
            message = refused(line.replace("TAKEN", port))
            missing = [one for one in says if one.replace("TAKEN", port) not in message]
            assert not missing, (line, message, missing)
