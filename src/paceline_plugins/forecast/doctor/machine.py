# SPDX-License-Identifier: Apache-2.0
"""Examines the worker's own machine, without the network."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import threading
from pathlib import Path

import numpy
import torch

from paceline.core.world import host_name
from paceline.version import __version__
from paceline_plugins.forecast.doctor.measured import Machine

LOOKUP_S = 5.0  # for the host's own name; a name server may be down
NETWORK = Path("/sys/class/net")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def examine(rank: int) -> Machine:
    """This worker's machine."""
    found, resolved = interfaces(), lookup(host_name())
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return Machine(
        rank=rank,
        host=host_name(),
        versions=versions(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_bytes=memory_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        open_files=open_files(),
        gpus=[torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
        interfaces=found,
        mtus=mtus(),
        wires_mbit=wires_mbit(),
        resolved=resolved,
        asked_interface=asked,
        gloo_address=gloo_address(asked, found, resolved),
    )


def versions() -> dict[str, str]:
    """Versions that should match on all workers."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "paceline": __version__,
        "system": f"{platform.system()} {platform.release()}",
    }


def gloo_address(asked: str, found: dict[str, str], resolved: list[str]) -> str:
    """Where gloo will listen: on the interface that was set, or at the address of the host's own name."""
    if asked:
        return found.get(asked.split(",")[0].strip(), "")
    return resolved[0] if resolved else ""


def interfaces() -> dict[str, str]:
    """Name -> IPv4 address of every interface that has one; empty where the system does not say."""
    addresses = {}
    with contextlib.suppress(OSError):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                    addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def mtus(folder: Path = NETWORK) -> dict[str, int]:
    """Name -> largest packet of every interface but loopback."""
    return {place.name: size for place in _interfaces(folder) if (size := _number(place / "mtu")) > 0}


def wires_mbit(folder: Path = NETWORK) -> dict[str, int]:
    """Name -> negotiated rate of every physical interface that is up; a virtual one has no rate that means anything."""
    physical = [place for place in _interfaces(folder) if (place / "device").exists()]
    return {place.name: rate for place in physical if (rate := _number(place / "speed")) > 0}


def _interfaces(folder: Path) -> list[Path]:
    return [place for place in sorted(folder.glob("*")) if place.name != "lo"]


def _number(path: Path) -> int:
    """What a file of the kernel says; 0 where it says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def lookup(name: str) -> list[str]:
    """The IPv4 addresses of a name; empty without an answer in time."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
                found.append(str(entry[4][0]))

    thread = threading.Thread(target=ask, name="doctor-lookup", daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return list(dict.fromkeys(found))


def memory_bytes() -> int | None:
    """Available memory, by Linux's estimate."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def open_files() -> int:
    """Limit of open files and sockets of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
