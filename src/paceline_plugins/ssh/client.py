# SPDX-License-Identifier: Apache-2.0
"""OpenSSH's client: the command that starts a host's far end, and what its errors mean."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from paceline_plugins.ssh import far_end
from paceline_plugins.ssh.hosts import Host

CONNECT_S = 10
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ForwardX11=no"),
)
"""Never a question that nobody would answer; a connection that is cut ends after 15 seconds."""
NO_PYTHON = "paceline: no python"

# What ssh, or the shell there, says -> what is wrong, and what to do. {ssh}: the user's own command to try it.
MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than before: if the machine was set up again, "
     "ssh-keygen -R {name} and then {ssh}"),
    (r"Host key verification failed|host key is known", "its host key is not known here: {ssh}, compare the key, and "
     "answer yes"),
    (r"Permission denied|Too many authentication failures", "it refuses this user's keys: ssh-copy-id {target}, until "
     "{ssh} asks for no password"),
    (r"Could not resolve|Name or service not known", "this machine does not know the name: correct it, or give it a "
     "HostName in ~/.ssh/config"),
    (r"Connection refused", "no ssh server listens there: start sshd on it, or name its port (NAME:PORT)"),
    (r"timed out|No route to host|Network is unreachable", "it does not answer: is it on, and does its firewall let "
     "ssh in?"),
    (re.escape(NO_PYTHON), "it has no Python: install Python 3.10 or newer, or name it with [hosts.{name}] "
     'python = "..." in paceline.toml'),
    (r"SyntaxError|future feature annotations", "its Python is too old: name one from 3.10 on with [hosts.{name}] "
     'python = "..." in paceline.toml'),
)  # fmt: skip


def command(host: Host, source: str) -> list[str]:
    """Starts the far end on a host over ssh; `source` is what it reads first."""
    port = [] if host.port is None else ["-p", str(host.port)]
    return ["ssh", *OPTIONS, *port, "--", host.destination, f"exec sh -c {shlex.quote(_shell(host, source))}"]


def local_command(source: str) -> list[str]:
    """Starts the far end on this machine."""
    return [sys.executable, "-u", "-c", _start(source)]


def _start(source: str) -> str:
    return f"import sys; exec(sys.stdin.buffer.read({len(source.encode())}))"


def _shell(host: Host, source: str) -> str:
    """Finds a Python there, without `!`, which some shells expand even in quotes."""
    known = [host.python] if host.python is not None else [sys.executable, "python3", "python"]
    found = " ".join(shlex.quote(name) for name in known)
    tries = f'if command -v "$p" >/dev/null 2>&1; then exec "$p" -u -c "{_start(source)}"; fi'
    return f"for p in {found}; do {tries}; done; echo '{NO_PYTHON}' >&2; exit 127"


def source() -> str:
    """The far end's program."""
    return Path(far_end.__file__).read_text(encoding="utf-8")


def installed() -> bool:
    """Whether there is an ssh."""
    return shutil.which("ssh") is not None


def is_here(host: Host) -> bool:
    """Whether a host is this machine: what ssh would connect to is an address of ours.

    With a user or a port it is not: somebody else's ssh server may listen there, such as a container's.
    """
    if host.user is not None or host.port is not None:
        return False
    if host.name == socket.gethostname():
        return True
    return _is_own_address(_resolved(host))


def _resolved(host: Host) -> str:
    """The name or address that ssh would connect to."""
    try:
        done = subprocess.run(
            ["ssh", "-G", "--", host.destination], capture_output=True, text=True, timeout=CONNECT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    match = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return host.name if match is None else match[1]


def _is_own_address(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, _, _, _, where in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind((where[0], 0, *where[2:]))
                return True
        except OSError:
            continue
    return False


def meaning(host: Host, said: str, code: int | None) -> str:
    """Why a host's far end did not start, and what to do, from what ssh wrote and its exit code."""
    port = "" if host.port is None else f"-p {host.port} "
    names = {"name": host.name, "target": f"{port}{host.destination}", "ssh": f"ssh {port}{host.destination}"}
    for pattern, text in MEANINGS:
        if re.search(pattern, said):
            return text.format(**names)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    end = f"ssh ended with {code}" if code is not None else "it does not answer"
    return f"{end}: {lines[-1] if lines else 'it said nothing'}; try {names['ssh']} true"
