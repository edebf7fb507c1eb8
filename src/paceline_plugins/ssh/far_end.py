# SPDX-License-Identifier: Apache-2.0
"""What runs on each host: checks it, takes the program, starts `paceline run` there, and sends back what it writes.

The near end sends this file's text over ssh to a Python that need not have paceline. So it uses the standard library
alone, and the Python of long ago. Both ends write messages: one line of JSON, then as many raw bytes as its key `bytes`
says. Nothing is unpickled, and no secret is on a command line: `job.pem` and the environment come through stdin.

The near end's death is the end of stdin, and a cut link its silence: both end the launcher of this host.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from typing import Any, BinaryIO

MAGIC = "paceline far end 1"
"""The first line; what a shell's start-up files print comes before it."""
SILENCE_S = 60.0
"""The near end sends something every two seconds; after such a silence the link is cut."""
STOP_S = 12.0
"""A launcher gets so long to end its workers; then it is killed."""
REACH_S = 5.0
POLL_S = 0.1
CHUNK_BYTES = 1 << 18
BROUGHT = ".paceline-brought.json"
VERSIONS = """
import importlib.util, json, os
found = {}
try:
    import paceline
    found["paceline"] = paceline.__version__
except Exception as error:
    found["why"] = "%s: %s" % (type(error).__name__, error)
try:
    spec = importlib.util.find_spec("torch")
    if spec is not None:
        names = {}
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            exec(file.read(), names)
        found["torch"] = str(names["__version__"])
except Exception:
    pass
print(json.dumps(found))
"""


class Pipe:
    """The way to the near end, of which a cut link leaves a full pipe that no process reads.

    Args:
        file: its number.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        os.set_blocking(file, False)

    def write(self, data: bytes) -> None:
        """Write all of it; OSError if nothing is taken for `SILENCE_S`."""
        rest = memoryview(data)
        while rest:
            if not select.select([], [self.file], [], SILENCE_S)[1]:
                raise TimeoutError("the near end takes nothing")
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self.file, rest) :]

    def flush(self) -> None:
        """Nothing is kept back."""


class Near:
    """The connection to the near end.

    Args:
        source, target: binary streams.
    """

    def __init__(self, source: BinaryIO, target: BinaryIO | Pipe) -> None:
        self.source, self.target = source, target
        self.lock = threading.Lock()
        self.heard_at = self.said_at = time.monotonic()
        self.gone = False
        self.messages: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()

    def say(self, kind: str, data: bytes = b"", **facts: Any) -> None:
        """Send a message; a lost connection is noted."""
        head = json.dumps(dict(facts, kind=kind, bytes=len(data))).encode() + b"\n"
        try:
            with self.lock:
                self.target.write(head + data)
                self.target.flush()
            self.said_at = time.monotonic()
        except (OSError, ValueError):
            self.gone = True

    def listen(self) -> None:
        """Put every message into the queue; one of the kind `leave` at the end. In a thread of its own."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            while True:
                line = self.source.readline()
                if not line:
                    break
                message = json.loads(line.decode())
                data = self.source.read(message["bytes"])
                if len(data) < message["bytes"]:
                    break
                self.heard_at = time.monotonic()
                if message["kind"] != "ping":
                    self.messages.put((message, data))
        self.gone = True
        self.messages.put(({"kind": "leave"}, b""))


class Mirror:
    """Sends what is new below a folder: no certificates, and the workers' own files only at the end."""

    def __init__(self, folder: str, near: Near) -> None:
        self.folder, self.near = folder, near
        self.sent: dict[str, tuple[int, int]] = {}  # path -> (inode, bytes)

    def look(self, everything: bool = False) -> None:
        """Send one chunk of each file that has grown; with `everything`, all that is left."""
        for folder, folders, names in os.walk(self.folder):
            folders[:] = sorted(set(folders) - ({"certificates"} if everything else {"certificates", "files"}))
            for name in sorted(names):
                path = os.path.join(folder, name)
                while self._send(path) and everything and not self.near.gone:
                    pass

    def _send(self, path: str) -> bool:
        try:
            status = os.lstat(path)
            inode, sent = self.sent.get(path, (status.st_ino, -1))
            if inode != status.st_ino or status.st_size < sent:  # replaced
                sent = -1
            if status.st_size <= sent or (status.st_mode & 0o170000) != 0o100000:
                return False
            with open(path, "rb") as file:
                file.seek(max(sent, 0))
                data = file.read(CHUNK_BYTES)
        except OSError:
            return False
        self.near.say("file", data, path=os.path.relpath(path, self.folder), offset=max(sent, 0))
        self.sent[path] = (status.st_ino, max(sent, 0) + len(data))
        return len(data) == CHUNK_BYTES


class FarEnd:
    """Answers the near end's questions, one after another, and at last runs the launcher."""

    def __init__(self, near: Near) -> None:
        self.near = near
        self.listener: socket.socket | None = None
        self.child: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Until the near end leaves or the launcher has ended."""
        self.near.say("hello", **about())
        while True:
            try:
                message, data = self.near.messages.get(timeout=SILENCE_S)
            except queue.Empty:
                if self._lost():
                    return
                continue
            if message["kind"] == "leave":
                return
            try:
                self.near.say("answer", **(getattr(self, "on_" + message["kind"])(message, data) or {}))
            except (OSError, ValueError, tarfile.TarError) as error:
                self.near.say("answer", error=f"{type(error).__name__}: {error}")
            if message["kind"] == "start" and self.child is not None:
                return self.follow(message, self.child)

    def on_check(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """What of the program is missing in its folder and in the copy of earlier runs, and the versions."""
        folder = os.path.expanduser(message["directory"])
        copy = kept("programs", message["copy"])
        wanted = message["files"]
        asked = os.path.join(folder, message["program"]) if message["program"] else folder
        is_there = os.path.isdir(folder)
        return {
            "directory": is_there,
            "writable": is_there and os.access(folder, os.W_OK | os.X_OK),
            "program": os.path.exists(asked),
            "differ": differing(folder, wanted),
            "copy_differs": differing(copy, wanted) if wanted else [],
            "copy": copy,
            "free": shutil.disk_usage(existing(copy)).free,
            "versions": versions(folder if is_there else None, message["environment"]),
        }

    def on_listen(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Listen where the hosts shall meet; returns the port."""
        family = socket.AF_INET6 if ":" in message["address"] else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("", message["port"]))
        self.listener.listen(64)
        threading.Thread(target=greet, args=(self.listener, message["token"].encode()), daemon=True).start()
        return {"port": self.listener.getsockname()[1]}

    def on_reach(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Whether the host that listens is reached from here, and is the right one."""
        token = message["token"].encode()
        with socket.create_connection((message["address"], message["port"]), timeout=REACH_S) as sock:
            got = b""
            while len(got) < len(token):
                more = sock.recv(len(token) - len(got))
                if not more:
                    break
                got += more
            own = sock.getsockname()[0]
        return {"own": own} if got == token else {"error": "another program listens there"}

    def on_bring(self, message: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Unpack the files of the program that are missing or differ."""
        copy = kept("programs", message["copy"])
        os.makedirs(copy, mode=0o700, exist_ok=True)
        note = os.path.join(copy, BROUGHT)
        with contextlib.suppress(OSError, ValueError):  # what was brought before, and is no part of the program now
            with open(note, encoding="utf-8") as file:
                for path in set(json.load(file)) - set(message["files"]):
                    os.unlink(inside(copy, path))
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                unpack(archive, member, inside(copy, member.name))
        with open(note, "w", encoding="utf-8") as file:
            json.dump(sorted(message["files"]), file)
        return {"differ": differing(copy, message["files"])}

    def on_start(self, message: dict[str, Any], _: bytes) -> None:
        """Write the job's secret, and start the launcher."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
        job = kept("jobs", message["job"])
        os.makedirs(job, mode=0o700)
        logs = message["logs"] or os.path.join(job, "logs")
        os.makedirs(os.path.join(logs, "output"), exist_ok=True)
        arguments = [*message["options"], "--log", logs]
        if message["secret"]:
            secret = os.path.join(job, "job.pem")
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(message["secret"])
            arguments += ["--job", secret]
        said = os.path.join(logs, "output", message["said"])
        with open(said + ".launcher", "wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments, *message["program"]],
                cwd=os.path.expanduser(message["directory"]),
                env=dict(os.environ, PACELINE_ENDING=said + ".json", **message["environment"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the workers' output, which is in their files as well
                stderr=file,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def follow(self, message: dict[str, Any], child: subprocess.Popen[bytes]) -> None:
        """Until the launcher has ended; then remove what the job left here."""
        job = kept("jobs", message["job"])
        mirror = None if message["logs"] else Mirror(os.path.join(job, "logs"), self.near)
        while child.poll() is None and not self._lost():
            if mirror is not None:
                mirror.look()
            if time.monotonic() - self.near.said_at > 2.0:
                self.near.say("alive")
            with contextlib.suppress(queue.Empty):
                found, _ = self.near.messages.get(timeout=POLL_S)
                if found["kind"] == "signal":
                    send_signal(child, found["number"])
        if child.poll() is None:
            stop(child)
        if mirror is not None:
            mirror.look(everything=True)
        code = child.poll()
        if self.near.gone and mirror is not None:  # the logs stay here, the secrets do not
            shutil.rmtree(os.path.join(job, "logs", "certificates"), ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(job, "job.pem"))
        else:
            shutil.rmtree(job, ignore_errors=True)
        self.near.say("ended", code=-int(signal.SIGKILL) if code is None else code)

    def _lost(self) -> bool:
        return self.near.gone or time.monotonic() - self.near.heard_at > SILENCE_S


def send_signal(child: subprocess.Popen[bytes], number: int) -> None:
    """To the launcher; SIGKILL to its whole group."""
    with contextlib.suppress(OSError):
        (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)


def stop(child: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its workers; kill it if it does not."""
    send_signal(child, signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        send_signal(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)


def about() -> dict[str, Any]:
    """This host: its name, which machine it is, and the addresses of the ssh connection."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    boot = namespace = ""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    return {
        "hostname": socket.gethostname(),
        "python": [sys.executable, ".".join(map(str, sys.version_info[:3]))],
        "machine": [boot or socket.gethostname(), namespace, os.path.expanduser("~")],
        "near_address": connection[0] if len(connection) == 4 else "",
        "address": connection[2] if len(connection) == 4 else "",
    }


def versions(folder: str | None, environment: dict[str, str]) -> dict[str, str]:
    """Of paceline and torch, as this Python finds them from the folder."""
    done = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        cwd=folder,
        env=dict(os.environ, **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    try:
        return dict(json.loads(done.stdout.decode().splitlines()[-1]))
    except (IndexError, ValueError):
        return {"why": done.stderr.decode(errors="replace")[-300:]}


def differing(folder: str, wanted: dict[str, str]) -> list[str]:
    """The files that are missing in the folder or have another sha256."""
    found = []
    for path in sorted(wanted):
        try:
            with open(os.path.join(folder, path), "rb") as file:
                same = hashlib.sha256(file.read()).hexdigest() == wanted[path]
        except OSError:
            same = False
        if not same:
            found.append(path)
    return found


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Replace one file by that of the archive."""
    source = archive.extractfile(member) if member.isfile() else None
    if source is None:
        raise ValueError(f"not a file: {member.name}")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "wb") as file:
        shutil.copyfileobj(source, file)
    os.chmod(path + ".new", 0o700 if member.mode & 0o100 else 0o600)
    os.replace(path + ".new", path)


def kept(what: str, name: str) -> str:
    """A folder of this host's cache: of the `programs` that were brought, or of the `jobs` that run."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return inside(os.path.join(cache, "paceline", what), name)


def inside(folder: str, name: str) -> str:
    """A path below the folder; refuses one that leads out of it."""
    path = os.path.normpath(os.path.join(folder, name))
    if os.path.isabs(name) or not path.startswith(folder + os.sep):
        raise ValueError(f"{name!r} leads out of {folder}")
    return path


def existing(path: str) -> str:
    """The nearest folder above that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def greet(listener: socket.socket, token: bytes) -> None:
    """Send the token to everyone who connects, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(token)


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM at this process' end, should it be killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def main() -> None:
    """Over stdin and stdout."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the launcher would inherit
    near = Near(sys.stdin.buffer, Pipe(sys.stdout.fileno()))
    near.target.write(MAGIC.encode() + b"\n")
    near.target.flush()
    threading.Thread(target=near.listen, daemon=True).start()
    FarEnd(near).serve()


if __name__ == "__main__":
    main()
