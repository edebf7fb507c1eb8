# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces on a switch, each with a link of a given rate and delay.

    with EmulatedNetwork(hosts=4, rate_mbit=1000, delay_ms=1) as network:
        subprocess.run([*network.prefix(2), "python", "train.py"], env=os.environ | network.environment(2))

A host is a namespace with one interface, `eth0`, and a name of its own, `host0`, `host1` and so on, by which the others
find it. Its cable leads to a bridge in one more namespace; both ends of the cable are shaped (tbf), so sending and
receiving are limited each for itself, as in a switched network. The delay is the time that a packet takes from any host
to any other, one way; it is added on arrival by `delay.py`, because many kernels have no netem. A link can be cut,
slowed, and made to lose packets (`loss.py`).

Needs Linux, root, pyroute2 and the command `ip` (`possible()` says what is missing). Nothing outlives the `with`: not
after an exception, not after Ctrl-C; and what a killed process left behind, the next network removes. All hosts share
this machine's processors, and that, not the wire, is the limit where links are many and fast:
`benchmarks/speed/network.py --check` measures it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .loss import set_losses

PREFIX = "pacenet"
SUBNET = "10.83.48"
MOST_HOSTS = 250
BURST_S, BURST_LEAST_BYTES = 0.002, 70_000  # a whole large packet of TCP has to pass
QUEUE_MS = 50  # what a switch port holds before it drops
NAMED = re.compile(PREFIX + r"-(\d+)-(\d+)-\d+-\w+")
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
START_S = 20.0
NO_IPV6_ADDRESS = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}

_serial = itertools.count()


class EmulationError(RuntimeError):
    """The emulated network cannot be made or changed."""


class EmulatedNetwork:
    """Hosts on a switch, for as long as the `with` lasts.

    Args:
        hosts: how many, 1..250.
        rate_mbit: of every host's link, each direction, Mbit/s; or one number for each host.
        delay_ms: from any host to any other, one way, milliseconds.
    """

    subnet = SUBNET

    def __init__(self, hosts: int, rate_mbit: float | Sequence[float] = 1000.0, delay_ms: float = 0.0) -> None:
        self.hosts = hosts
        self.rates_mbit = [float(r) for r in rate_mbit] if isinstance(rate_mbit, Sequence) else [rate_mbit] * hosts
        self.delay_ms = delay_ms
        self.losses = [0.0] * hosts
        self._check()
        owner = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._switch = f"{owner}-switch"
        self._names = [f"{owner}-h{k}" for k in range(hosts)]
        self._cables = list(self._names)  # where each host's cable ends
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
        if importlib.util.find_spec("pyroute2") is None:
            return "needs pyroute2 (pip install pyroute2)"
        if shutil.which("ip") is None:
            return "needs the command ip (package iproute2)"
        held = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)  # type: ignore[index]
        if not held >> CAP_NET_ADMIN & 1 or not held >> CAP_SYS_ADMIN & 1:
            return "needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
        return ""

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self.subnet}.{host + 1}"

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
        with _inside(self._cables[host]) as links:
            return int(_link(links, self.interface(host)).get_attr("IFLA_STATS64")["tx_bytes"])

    def cut(self, host: int) -> None:
        """Pull a host's cable out of the switch."""
        self._set_port(host, "down")

    def mend(self, host: int) -> None:
        """Plug a host's cable in again."""
        self._set_port(host, "up")

    def _set_port(self, host: int, state: str) -> None:
        with _inside(self._switch) as links:
            links.link("set", index=_link(links, f"port{host}")["index"], state=state)

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
        for name in dict.fromkeys([*self._names, *self._cables, self._switch]):
            _remove(name)

    def _build(self) -> None:
        from pyroute2 import netns

        netns.create(self._switch)
        with _inside(self._switch) as links:
            links.link("add", ifname="switch", kind="bridge", br_forward_delay=0)
            self._up(links, "switch")
        for host in range(self.hosts):
            self._write_hosts_file(host)
            netns.create(self._names[host])
            self._add(host)
        if self.delay_ms:
            self._start_delay_line()

    def _add(self, host: int) -> None:
        """One host's cable."""
        port, interface = f"port{host}", self.interface(host)
        with _inside(self._switch) as links:
            links.link("add", ifname=port, kind="veth", peer={"ifname": interface, "net_ns_fd": self._cables[host]})
            self._up(links, port, master=_link(links, "switch")["index"])
        with _inside(self._cables[host]) as links:
            links.link("set", index=_link(links, "lo")["index"], state="up")
            links.addr("add", index=_link(links, interface)["index"], address=self.address(host), prefixlen=24)
            self._up(links, interface)
        self._shape(host)

    @staticmethod
    def _up(links: Any, name: str, **more: Any) -> None:
        links.link("set", index=_link(links, name)["index"], state="up", IFLA_AF_SPEC=NO_IPV6_ADDRESS, **more)

    def _write_hosts_file(self, host: int) -> None:
        """`ip netns exec` lays this over /etc/hosts, so that the hosts' names lead to their addresses."""
        directory = _settings(self._names[host])
        directory.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{self.address(k)} {self.name(k)}" for k in range(self.hosts))]
        (directory / "hosts").write_text("\n".join(lines) + "\n")

    def _shape(self, host: int) -> None:
        """Both ends of the cable."""
        rate = self.rates_mbit[host] * 1e6 / 8
        burst = max(BURST_LEAST_BYTES, int(rate * BURST_S))
        for namespace, name in ((self._cables[host], self.interface(host)), (self._switch, f"port{host}")):
            with _inside(namespace) as links:
                index = _link(links, name)["index"]
                links.tc("replace", "tbf", index, 0x10000, rate=int(rate), burst=burst, latency=f"{QUEUE_MS}ms")

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
        ready = select.select([self._delay_line.stdout], [], [], START_S)[0]
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


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[Any]:
    """The links of a namespace; what the kernel refuses is an EmulationError."""
    from pyroute2 import NetlinkError, NetNS

    try:
        with NetNS(namespace, flags=0) as links:
            yield links
    except (NetlinkError, OSError) as error:
        raise EmulationError(f"the kernel refuses to change the links of {namespace}: {error}") from error


def _link(links: Any, name: str) -> Any:
    """A link by its name."""
    found = [link for link in links.get_links() if link.get_attr("IFLA_IFNAME") == name]
    if not found:
        raise EmulationError(f"there is no link {name} in {links.status['netns']}")
    return found[0]
