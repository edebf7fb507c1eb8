# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a benchmark: this script again, once for each rank, on one host or in network namespaces."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing.context
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import paceline


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_worker() -> bool:
    """Whether this process was started by `launch`."""
    return "RANK" in os.environ


def answer(values: dict[str, Any]) -> None:
    """Print what rank 0 found, for `launch` to read."""
    if os.environ["RANK"] == "0":
        print("ANSWER " + json.dumps(values), flush=True)


def launch(
    script: str, arguments: list[str], workers: int, timeout_s: float, hosts: Hosts | None = None
) -> dict[str, Any]:
    """Run `script` in `workers` processes of one thread each, and return what rank 0 answered."""
    address = hosts.address(0) if hosts else "127.0.0.1"
    port = str(free_port())
    start = Copy if is_quick() else subprocess.Popen
    for name in ("attach", "attach_arrays") if is_quick() else ():
        getattr(paceline, name)  # loads what the copies need
    processes: list[Any] = []
    with tempfile.TemporaryFile("w+") as out:
        for rank in range(workers):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_RANK": "0" if hosts else str(rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            if hosts:
                environment["GLOO_SOCKET_IFNAME"] = hosts.interface(rank)
            command = [*(hosts.prefix(rank) if hosts else []), sys.executable, script, *arguments]
            sink = out if rank == 0 else subprocess.DEVNULL
            processes.append(start(command, env={**os.environ, **environment}, stdout=sink))
        try:
            for process in processes:
                process.wait(timeout=60 if process is not processes[0] else timeout_s)
        finally:
            for process in processes:
                process.kill()
        out.seek(0)
        return _answer_in(out.read(), script, arguments)


def is_quick() -> bool:
    """Whether this process shows only that a benchmark runs."""
    return "--quick" in sys.argv or "PACELINE_CLAIMS" in os.environ


class Copy(multiprocessing.context.ForkProcess):
    """As much of `Popen` as is needed, for the quick form: a script's command without another start of Python.

    It begins as a copy of this process, which has loaded the script, and calls its `main` as the command would.

    Args:
        command: with the prefix of a host, if it runs on one.
        env: all variables.
        stdout, stderr: files.
        more: `start_new_session` of `Popen`.
    """

    def __init__(self, command: list[str], env: dict[str, str], stdout: Any, stderr: Any = None, **more: Any) -> None:
        super().__init__()
        self._command, self._env, self._sinks = command, env, {1: stdout, 2: stderr}
        self._own_session = more.get("start_new_session", False)
        self.start()

    def run(self) -> None:
        """In the copy."""
        if self._own_session:
            os.setsid()
        for number, sink in self._sinks.items():
            if sink is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY) if sink == subprocess.DEVNULL else sink.fileno(), number)
        if self._command[0] == "ip":
            _enter(self._command[3])
        os.environ.update(self._env)
        sys.argv = self._command[self._command.index(sys.executable) + 1 :]
        sys.modules.get(Path(sys.argv[0]).stem, sys.modules["__main__"]).main()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> None:
        """Until it ends."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)


def _enter(namespace: str) -> None:
    """What `ip netns exec` does: go to a network namespace, with its interfaces in /sys and its files in /etc."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        done = [libc.setns(place.fileno(), 0), libc.unshare(0x00020000), libc.mount(b"", b"/", None, 0x84000, None)]
    done.append(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    for path in Path("/etc/netns", namespace).glob("*"):
        done.append(libc.mount(bytes(path), os.fsencode(f"/etc/{path.name}"), None, 0x1000, None))
    if any(done):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _answer_in(text: str, script: str, arguments: list[str]) -> dict[str, Any]:
    for line in text.splitlines():
        if line.startswith("ANSWER "):
            found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
            return found
    raise SystemExit(f"{script} {' '.join(arguments)}: rank 0 gave no answer; it printed:\n{text}")


def mpiexec() -> str:
    """The launcher of the MPI that is installed beside this Python, with mpi4py; empty if there is none."""
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return found if found is not None and importlib.util.find_spec("mpi4py") is not None else ""


def launch_under_mpi(script: str, arguments: list[str], workers: int, timeout_s: float) -> dict[str, Any]:
    """As `launch`, by MPI's own launcher, so that workers may exchange over MPI as well."""
    environment = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [mpiexec()]
    for rank in range(workers):
        command += [":"] if rank else []
        command += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(rank), sys.executable, script]
        command += arguments
    done = subprocess.run(
        command,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    )
    return _answer_in(done.stdout, script, arguments)


class Hosts:
    """Two network namespaces joined by a pair of interfaces of a given rate; needs root, iproute2 and tc.

    Args:
        rate_mbit: of each direction, in Mbit/s.
    """

    def __init__(self, rate_mbit: float) -> None:
        self._names = [f"paceline{os.getpid()}h{k}" for k in (0, 1)]
        self._rate = rate_mbit

    @staticmethod
    def possible() -> str:
        """Why namespaces cannot be made here; empty where they can."""
        if os.geteuid() != 0:
            return "needs root"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        return f"needs {' and '.join(missing)} (iproute2)" if missing else ""

    def address(self, rank: int) -> str:
        """The address of host `rank`."""
        return f"10.83.47.{rank + 1}"

    def interface(self, rank: int) -> str:
        """Its interface."""
        return f"veth{rank}"

    def prefix(self, rank: int) -> list[str]:
        """What runs a command on host `rank`."""
        return ["ip", "netns", "exec", self._names[rank]]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that left host `rank`, headers of TCP, IP and Ethernet included."""
        path = f"/sys/class/net/{self.interface(rank)}/statistics/tx_bytes"
        return int(subprocess.run([*self.prefix(rank), "cat", path], check=True, capture_output=True, text=True).stdout)

    def __enter__(self) -> Hosts:
        a, b = self._names
        for name in self._names:
            self._do(f"ip netns add {name}")
        self._do(f"ip link add veth0 netns {a} type veth peer name veth1 netns {b}")
        for rank, name in enumerate(self._names):
            inside = f"ip netns exec {name}"
            self._do(f"{inside} ip addr add {self.address(rank)}/24 dev veth{rank}")
            self._do(f"{inside} ip link set veth{rank} up")
            self._do(f"{inside} ip link set lo up")
            self._do(f"{inside} tc qdisc add dev veth{rank} root tbf rate {self._rate}mbit burst 256kb latency 50ms")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    @staticmethod
    def _do(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)
