# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces on a switch, each with a link of a given rate and delay.

    with EmulatedNetwork(hosts=4, rate_mbit=1000, delay_ms=1) as network:
        subprocess.run([*network.prefix(2), "python", "train.py"], env=os.environ | network.environment(2))

A host is a namespace with one interface, `eth0`, and a name of its own, `host0`, `host1` and so on, by which the others
find it. Its cable leads to a bridge in one more namespace; both ends of the cable are shaped (tbf), so sending and
receiving are limited each for itself, as in a switched network. The delay is the time that a packet takes from any host
to any other, one way; it is added on arrival by :mod:`paceline.forecast.sim.delay`, because many kernels have no netem.
A link can be cut, slowed, and made to lose packets (:mod:`paceline.forecast.sim.loss`).

Needs Linux, root and iproute2 (`possible()` says what is missing). Nothing outlives the `with`: not after an exception,
not after Ctrl-C; and what a killed process left behind, the next network removes. All hosts share this machine's
processors, and that, not the wire, is the limit where links are many and fast: `benchmarks/network.py --check` measures
it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.forecast.sim.loss import set_losses

PREFIX = "pacenet"
SUBNET = "10.83.48"
MOST_HOSTS = 250
BURST_S, BURST_LEAST_BYTES = 0.002, 70_000  # a whole large packet of TCP has to pass
QUEUE_MS = 50  # what a switch port holds before it drops
NAMED = re.compile(PREFIX + r"-(\d+)-(\d+)-\d+-\w+")
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
COMMAND_S = 20.0

_serial = itertools.count()


class EmulationError(PacelineError, RuntimeError):
    """The emulated network cannot be made or changed; the message has the command that failed."""


class EmulatedNetwork:
    """Hosts on a switch, for as long as the `with` lasts.

    Args:
        hosts: how many, 1..250.
        rate_mbit: of every host's link, each direction, Mbit/s; or one number for each host.
        delay_ms: from any host to any other, one way, milliseconds.
    """

    def __init__(self, hosts: int, rate_mbit: float | Sequence[float] = 1000.0, delay_ms: float = 0.0) -> None:
        self.hosts = hosts
        self.rates_mbit = [float(r) for r in rate_mbit] if isinstance(rate_mbit, Sequence) else [rate_mbit] * hosts
        self.delay_ms = delay_ms
        self.losses = [0.0] * hosts
        self._check()
        owner = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._switch = f"{owner}-switch"
        self._names = [f"{owner}-h{k}" for k in range(hosts)]
        self._delay_line: subprocess.Popen[str] | None = None

    def _check(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise EmulationError(f"hosts must lie in 1..{MOST_HOSTS}, got {self.hosts}")
        if len(self.rates_mbit) != self.hosts:
            raise EmulationError(f"rate_mbit has {len(self.rates_mbit)} numbers for {self.hosts} hosts; give one each")
        if not min(self.rates_mbit) > 0:
            raise EmulationError(f"rate_mbit must be above 0, got {min(self.rates_mbit):g}")
        if self.delay_ms < 0:
            raise EmulationError(f"delay_ms must not be negative, got {self.delay_ms:g}")

    @staticmethod
    def possible() -> str:
        """Why no network can be emulated here; empty where one can."""
        if not sys.platform.startswith("linux"):
            return f"needs Linux, this is {sys.platform}"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"needs {' and '.join(missing)} (package iproute2)"
        held = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)  # type: ignore[index]
        if not held >> CAP_NET_ADMIN & 1 or not held >> CAP_SYS_ADMIN & 1:
            return "needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
        return ""

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{SUBNET}.{host + 1}"

    def interface(self, host: int) -> str:
        """The interface of a host, within it."""
        return "eth0"

    def name(self, host: int) -> str:
        """The host's name, which the other hosts can look up."""
        return f"host{host}"

    def prefix(self, host: int) -> list[str]:
        """What runs a command on a host, in front of that command."""
        named = f'hostname {self.name(host)} && exec "$@"'
        return ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c", named, "sh"]

    def environment(self, host: int) -> dict[str, str]:
        """Variables that lead gloo, NCCL and TensorPipe to the host's interface."""
        return {f"{library}_SOCKET_IFNAME": self.interface(host) for library in ("GLOO", "NCCL", "TP")}

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent, with headers (of a large packet of TCP, those of its first frame)."""
        path = f"/sys/class/net/{self.interface(host)}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self._names[host], "cat", path))

    def cut(self, host: int) -> None:
        """Pull a host's cable out of the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plug a host's cable in again."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def slow(self, host: int, rate_mbit: float) -> None:
        """Give a host's link another rate, in both directions."""
        if not rate_mbit > 0:
            raise EmulationError(f"rate_mbit must be above 0, got {rate_mbit:g}; cut({host}) stops a link")
        self.rates_mbit[host] = rate_mbit
        self._shape(host)

    def lose(self, host: int, share: float) -> None:
        """Let a host's link lose this share of its packets at random, in both directions; 0 for none any more.

        A large packet of TCP is lost as a whole; between two lossy hosts both links may lose it.
        """
        if not 0 <= share <= 1:
            raise EmulationError(f"share must lie in 0..1, got {share:g}")
        losses = [*self.losses[:host], share, *self.losses[host + 1 :]]
        try:
            set_losses(self._switch, {f"port{k}": lost for k, lost in enumerate(losses) if lost})
        except OSError as error:
            raise EmulationError(
                f"no packets can be lost here ({error}); it needs nftables for bridges and numgen in the kernel"
            ) from error
        self.losses = losses

    def __enter__(self) -> EmulatedNetwork:
        reason = self.possible()
        if reason:
            raise EmulationError(f"no network can be emulated here: {reason}")
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all of it, and whatever still runs in it. May be called twice."""
        if self._delay_line is not None:
            self._delay_line.kill()
            self._delay_line.communicate()
            self._delay_line = None
        for name in [*self._names, self._switch]:
            _remove(name)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self._switch, "link", "set", "switch", "addrgenmode", "none", "up")
        for host in range(self.hosts):
            self._add(host)
        if self.delay_ms:
            self._start_delay_line()

    def _add(self, host: int) -> None:
        """One host and its cable."""
        name, switch, port = self._names[host], self._switch, f"port{host}"
        self._write_hosts_file(host)
        _run("ip", "netns", "add", name)
        cable = f"link add {self.interface(host)} netns {name} type veth peer name {port} netns {switch}"
        _run("ip", *cable.split())
        _run("ip", "-n", switch, "link", "set", port, "master", "switch", "addrgenmode", "none", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", self.interface(host))
        _run("ip", "-n", name, "link", "set", self.interface(host), "addrgenmode", "none", "up")
        self._shape(host)

    def _write_hosts_file(self, host: int) -> None:
        """`ip netns exec` lays this over /etc/hosts, so that the hosts' names lead to their addresses."""
        directory = _settings(self._names[host])
        directory.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{self.address(k)} {self.name(k)}" for k in range(self.hosts))]
        (directory / "hosts").write_text("\n".join(lines) + "\n")

    def _shape(self, host: int) -> None:
        """Both ends of the cable."""
        rate = self.rates_mbit[host]
        burst = max(BURST_LEAST_BYTES, int(rate * 1e6 / 8 * BURST_S))
        shape = ["root", "tbf", "rate", f"{rate * 1e6:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
        _run("tc", "-n", self._names[host], "qdisc", "replace", "dev", self.interface(host), *shape)
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", f"port{host}", *shape)

    def _start_delay_line(self) -> None:
        program = str(Path(__file__).with_name("delay.py"))
        self._delay_line = subprocess.Popen(
            [sys.executable, "-S", "-E", program, str(self.delay_ms), *self._names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._delay_line.stdout is not None
        ready = select.select([self._delay_line.stdout], [], [], COMMAND_S)[0]
        if not ready or self._delay_line.stdout.readline() != "up\n":
            self._delay_line.kill()
            _, said = self._delay_line.communicate()
            raise EmulationError(
                "the delay line did not start (it needs nftables and NFQUEUE in the kernel); use delay_ms=0, "
                f"or look at what it said: {said.strip()[-300:]}"
            )


def sweep() -> list[str]:
    """Remove the networks whose makers are dead; the names of what was removed."""
    removed = []
    for place in (Path("/run/netns"), Path("/etc/netns")):
        for path in place.glob(f"{PREFIX}-*"):
            match = NAMED.fullmatch(path.name)
            if match and _started(int(match[1])) != int(match[2]):
                _remove(path.name)
                removed.append(path.name)
    return removed


def _remove(name: str) -> None:
    """A namespace, what runs in it, and its files in /etc."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(_settings(name), ignore_errors=True)


def _settings(name: str) -> Path:
    return Path("/etc/netns") / name


def _started(pid: int) -> int:
    """When a process started, in ticks since the machine did, so that its number can be told from a later owner's; 0
    where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError):
        return 0


def _run(*command: str) -> str:
    """Run one command of iproute2; its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise EmulationError(f"`{' '.join(command)}` did not end within {COMMAND_S:g} s") from None
    if done.returncode:
        raise EmulationError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
