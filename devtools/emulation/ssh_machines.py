# SPDX-License-Identifier: Apache-2.0
"""Machines with ssh servers on this one: a network namespace each, OpenSSH's sshd in it, and keys of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .emulated import EmulatedNetwork

SSHD = "/usr/sbin/sshd"
START_S = 20.0
SERVER = """
Port 22
HostKey {folder}/host_key
PidFile {folder}/{name}.pid
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
LogLevel ERROR
Subsystem sftp internal-sftp
SetEnv HOME={folder}/{name} {more}
"""
CLIENT = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


def possible() -> str:
    """What is missing; empty if nothing is."""
    missing = EmulatedNetwork.possible()
    if missing:
        return missing
    return "" if os.path.exists(SSHD) and shutil.which("ssh") else "OpenSSH's server or client is not installed"


@dataclass(frozen=True)
class Machines:
    """The network, and the folder of keys, homes and of the `ssh` that uses them."""

    network: EmulatedNetwork
    folder: Path

    def start(self, machine: int, command: Sequence[str], cwd: Path, more: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on a machine, as if it was typed there."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self.network.environment(machine), "PATH": path, **more}
        return subprocess.Popen(
            [*self.network.prefix(machine), *command], cwd=cwd, env=environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def close(self) -> None:
        """Kill whatever still runs on the machines, but their servers."""
        for machine in range(self.network.hosts):
            for pid in self.processes(machine, ""):
                if "sshd" not in _command_line(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def processes(self, machine: int, needle: str) -> list[int]:
        """Those of a machine whose command line has the needle."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.network.prefix(machine)[3]], capture_output=True, text=True, check=True
        )
        pids = [int(word) for word in found.stdout.split()]
        return [pid for pid in pids if needle in _command_line(pid)]


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@contextlib.contextmanager
def machines(
    folder: Path, count: int, *, servers: Sequence[int] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Machines]:
    """Machines `host0`, `host1` and so on, each with a home in `folder`.

    Args:
        folder: of keys and homes; empty.
        count: of the machines.
        servers: those that run an sshd; all by default.
        environment: what ssh's shells have there.
    """
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"host{index} {host_key}" for index in range(count)))
    (folder / "config").write_text(CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    for tool in ("ssh", "scp"):
        wrapper = folder / "bin" / tool
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which(tool)} -F {folder / "config"} "$@"\n')
        wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with EmulatedNetwork(count, rate_mbit=1000) as network, contextlib.ExitStack() as stack:
        for index in range(count) if servers is None else servers:
            stack.enter_context(_server(network, folder, index, environment or {}))
        yield Machines(network, folder)


@contextlib.contextmanager
def _server(network: EmulatedNetwork, folder: Path, index: int, environment: Mapping[str, str]) -> Iterator[None]:
    name = f"host{index}"
    (folder / name).mkdir()
    config = folder / f"{name}.conf"
    more = " ".join(f"{key}={value}" for key, value in environment.items())
    config.write_text(SERVER.format(folder=folder, name=name, more=more))
    server = subprocess.Popen([*network.prefix(index), SSHD, "-D", "-e", "-f", str(config)], start_new_session=True)
    try:
        _await_port(network, index)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _await_port(network: EmulatedNetwork, index: int) -> None:
    """Until the server listens."""
    probe = "import socket,sys; socket.create_connection((sys.argv[1], 22), 1).close()"
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        command = [*network.prefix(index), "python3", "-c", probe, network.address(index)]
        if subprocess.run(command, capture_output=True, timeout=START_S).returncode == 0:
            return
    raise AssertionError(f"no sshd on host{index} of {socket.gethostname()} within {START_S} s")
