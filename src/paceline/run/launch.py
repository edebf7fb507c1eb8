# SPDX-License-Identifier: Apache-2.0
"""Run a function on several processes of this host, from a script, a notebook or a REPL.

As a program, `python -m paceline.run.launch FOLDER NAME`, it is one of the workers: it calls the function that the
launching program has left in a folder, which nobody else may enter: what a process loads here, its own run has written.
"""

from __future__ import annotations

import codecs
import inspect
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import cloudpickle

from paceline.core import parent_death
from paceline.core.parse import is_whole
from paceline.errors import PeerLostError, UnsupportedError, WorkerFailedError

Result = TypeVar("Result")
GRACE_S = 30.0
"""After an interrupt the launcher stops its workers within a shorter time."""
INSIDE = "PACELINE_LAUNCHED"
MODULE = "paceline.run.launch"  # where it runs as a program, it has another name
CALL, RESULT, ERROR = "call", "result-{}", "error-{}"
"""Files of the folder: for all workers, and for the worker of a rank."""


def launch(
    target: Callable[..., Result],
    workers: int,
    arguments: Sequence[Any] = (),
    *,
    rule: str | None = None,
    log: str | Path | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> list[Result]:
    """Call `target` in `workers` processes of this host, as `paceline run` starts a program, and return the results.

    The function attaches as a program does; each worker has its own process, and its own GPU where there are some.
    What the workers print comes with their rank in front. An interrupt (Ctrl-C, or the notebook's stop button) ends
    them. The function and its arguments are sent to the workers by value if they belong to a notebook, a REPL or the
    started script, else by their module's name, so that no `if __name__ == "__main__"` is needed. To call the same
    function with virtual workers in this process, see :func:`paceline.simulate`.

    ::

        states = paceline.launch(train, workers=4, arguments=(0.1,))

    Args:
        target: the function; its result has to be picklable.
        workers: processes.
        arguments: of the function.
        rule: as text, for functions that name none.
        log: directory for the logs; by default a new one in `./paceline-logs`.
        timeout_s: seconds after which a worker that does not answer is lost.
        options: other options of `paceline run`: `restarts=2` starts all workers again when one fails, to resume from
            a checkpoint; `as_is=True` is for functions that attach nothing and share no work, which is an error
            without it; `quiet=True` prints only what the workers print.

    Returns:
        What `target` returned, by rank.

    Raises:
        UnsupportedError: the function or an argument cannot be sent, or the call is inside a worker.
        WorkerFailedError: a worker failed; the message ends with its traceback.
    """
    _check(target, workers)
    given = {"workers": workers, "timeout": timeout_s, "rule": rule, "log": log, **options}
    asked = [
        word
        for name, value in given.items()
        if value is not None and value is not False
        for word in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as place:
        folder = Path(place)
        what = f"{_name(target)}, what it uses, or an argument cannot be sent to the workers"
        (folder / CALL).write_bytes(_pickled((target, tuple(arguments)), what, "make it inside the function"))
        program = ["-m", MODULE, str(folder), _name(target)]
        code = _run([sys.executable, "-m", "paceline", "run", *asked, *program])
        if code:
            raise _failure(folder, workers, code)
        return [_result(folder, rank, workers) for rank in range(workers)]


def _check(target: Any, workers: Any) -> None:
    if not callable(target):
        raise UnsupportedError(
            f"launch calls a function, and got {target!r}; a program in a file is started by paceline run"
        )
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target):
        raise UnsupportedError(
            f"{_name(target)} is a generator or a coroutine, which a call does not run: give a function that trains"
        )
    if not is_whole(workers) or workers < 1:
        raise UnsupportedError(f"workers is a number of processes, at least 1, got {workers!r}")
    if INSIDE in os.environ:
        raise UnsupportedError("launch was called inside a worker of launch; call it under if __name__ == '__main__'")


def _name(target: Any) -> str:
    """A function's name for messages."""
    return str(getattr(target, "__name__", type(target).__name__))


def _pickled(value: Any, what: str, instead: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UnsupportedError(f"{what} ({type(error).__name__}: {error}): {instead}") from error


# -- the launcher ------------------------------------------------------------------------------------------------------


def _run(command: Sequence[str]) -> int:
    """Run the launcher, show what it prints, and return its exit code."""
    paths = [os.path.abspath(path) for path in sys.path if path]  # the workers find the modules that this program finds
    process = subprocess.Popen(
        [*parent_death.starter(), *command],
        env={**os.environ, INSIDE: "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C comes to this program alone, which passes it on
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        try:
            _show({process.stdout: sys.stdout, process.stderr: sys.stderr})
            return process.wait()
        except BaseException:  # whatever happens, it leaves no launcher behind
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _show(streams: Mapping[IO[bytes], TextIO]) -> None:
    """Copy pipes to text streams until all are closed; in this thread, so that a notebook shows it at this cell."""
    decoders = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in streams}
    with selectors.DefaultSelector() as selector:
        for pipe in streams:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                ready: Any = key.fileobj
                data = os.read(ready.fileno(), 1 << 16)
                streams[ready].write(decoders[ready].decode(data, final=not data))
                streams[ready].flush()
                if not data:
                    selector.unregister(ready)


# -- results -----------------------------------------------------------------------------------------------------------


def _failure(folder: Path, workers: int, code: int) -> WorkerFailedError:
    """The error of the worker that failed first; one that lost another worker is no cause."""
    files = [(folder / ERROR.format(rank), rank) for rank in range(workers)]
    found = [(*cloudpickle.loads(file.read_bytes()), rank) for file, rank in files if file.exists()]
    if not found:
        return WorkerFailedError(f"the workers ended with exit code {code}; what they printed last is above")
    _, _, headline, text, rank = min(found)
    return WorkerFailedError(f"rank {rank} of {workers} failed: {headline}\n\nIn the worker:\n{text}")


def _result(folder: Path, rank: int, workers: int) -> Any:
    file = folder / RESULT.format(rank)
    if not file.exists():
        ended = "the function ended its process (sys.exit, os._exit)"
        raise WorkerFailedError(f"rank {rank} of {workers} returned nothing: {ended}; let it return")
    return cloudpickle.loads(file.read_bytes())


# -- a worker ----------------------------------------------------------------------------------------------------------


def _work(folder: Path, rank: int) -> None:
    """Call the function, and leave its result or its error."""
    failed = folder / ERROR.format(rank)
    failed.unlink(missing_ok=True)  # of an earlier start
    target, arguments = cloudpickle.loads((folder / CALL).read_bytes())
    try:
        result = target(*arguments)
        what = f"the function's result, {type(result).__name__}, cannot be given back to the launching program"
        file = folder / RESULT.format(rank)
        file.with_suffix(".new").write_bytes(_pickled(result, what, "return numbers, tensors or a state_dict"))
        file.with_suffix(".new").replace(file)
    except Exception as error:
        headline = "".join(traceback.format_exception_only(error)).strip()
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function's
        text = "".join(traceback.format_exception(type(error), error, frames))
        # in the order in which the launching program looks for the cause
        failed.write_bytes(cloudpickle.dumps((isinstance(error, PeerLostError), time.time(), headline, text)))
        raise


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))
