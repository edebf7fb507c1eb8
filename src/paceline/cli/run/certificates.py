# SPDX-License-Identifier: Apache-2.0
"""The certificates of a job, and the network interface at which its workers listen."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import err, near, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.communication.sockets.certificates import Authority

LOOK_EVERY_S = 0.1
JOB = "job.pem"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def environment(cluster: LaunchCluster, tls: Path | None, in_the_clear: bool) -> dict[str, str]:
    """Variables that name the folder of this host's certificate, and the interface for torch's libraries.

    `in_the_clear` takes the certificate of the launcher's own environment from the workers.
    """
    added = {} if tls is None else {"PACELINE_TLS": str(tls.resolve())}
    if in_the_clear:
        added["PACELINE_TLS"] = ""
    name = _interface(cluster)
    if name is not None:
        # NCCL may have faster interfaces than that over which several hosts meet.
        variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if cluster.master is None else ("GLOO_SOCKET_IFNAME",)
        added |= {variable: name for variable in variables if variable not in os.environ}
    return added


@dataclass(frozen=True)
class HostCertificates:
    """Makes the certificates of one host's processes: a folder for each.

    Attributes:
        authority: of the job.
        folder: of this host.
    """

    authority: Authority
    folder: Path

    def __call__(self, rank: int) -> dict[str, str]:
        """The certificate of a rank of a run of a fixed size; returns the variable that names it."""
        return {"PACELINE_TLS": str(self.issue(f"rank-{rank}", f"rank-{rank}"))}

    def issue(self, name: str, role: str) -> Path:
        """A certificate for one process of this host."""
        place = self.folder / name
        try:
            self.authority.issue(place, f"{socket.gethostname()[:40]} {name}"[:64], role)
        except PacelineError as error:
            refuse(f"the job's certificates cannot be made: {error}")
        return place.resolve()


def for_workers(cluster: LaunchCluster, directory: Path, job: Path | None, announces: bool) -> HostCertificates | None:
    """Signs this host's workers; None if one worker is alone, or the environment names a certificate."""
    if os.environ.get("PACELINE_TLS") or (cluster.workers * cluster.hosts == 1 and job is None):
        return None
    return issue(cluster, directory, job, cluster.hosts > 1, announces)


def issue(
    cluster: LaunchCluster, directory: Path, job: Path | None, joinable: bool, announces: bool
) -> HostCertificates | None:
    """What signs the certificates of this host's processes; None if there is no authority.

    Host 0 makes the job's authority. It writes the authority's secret to a file only if other hosts need it.

    Args:
        cluster: the shape of the run.
        directory: of the logs.
        job: file of the job's secret: host 0 makes it if it does not exist; the other hosts wait for it.
        joinable: whether other hosts belong to the job, or can join it.
        announces: print where the secret is, and its use.
    """
    secrets = directory / "certificates"
    folder = secrets / f"host-{cluster.host_index}"
    try:
        secrets.mkdir(mode=0o700, exist_ok=True)
        secrets.chmod(0o700)
        if cluster.host_index == 0:
            authority: Authority | None = _host_0_authority(secrets, job, joinable, announces)
        else:
            authority = _shared_authority(job, cluster.timeout_s, announces)
    except (PacelineError, OSError) as error:
        refuse(f"the job's certificates cannot be made: {error}")
    return None if authority is None else HostCertificates(authority, folder)


def _host_0_authority(secrets: Path, job: Path | None, joinable: bool, announces: bool) -> Authority:
    """Load the authority from the job's file, or make a new one."""
    from paceline.communication.sockets.certificates import Authority

    if job is not None and job.exists():
        result = _load(job)
    else:
        result = Authority.new()
        job = job if job is not None or not joinable else secrets / JOB
        if job is not None:
            result.export(job)
    if job is not None and announces:
        shown = near(job)
        _say(f"for the other hosts: scp {shown} HOST:{JOB}, and there --job {JOB}; anyone with this file can join")
    return result


def _shared_authority(job: Path | None, timeout_s: float, announces: bool) -> Authority | None:
    """Load host 0's authority; on a shared disk, wait until host 0 has written the file."""
    if job is None:
        if announces:
            _say(f"no certificates: copy certificates/{JOB} of host 0, then --job {JOB}; or give --open on all hosts")
        return None
    until = time.monotonic() + timeout_s
    if not job.exists():
        _say(f"waiting for {near(job)}, which host 0 makes at its start")
    while not job.exists() and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    return _load(job)


def warn_open() -> None:
    """Print what `--open` means."""
    _say("--open: the workers' connections are neither encrypted nor authenticated: who reaches their ports can join")


def _load(job: Path) -> Authority:
    """Read the file, and print its warnings."""
    from paceline.communication.sockets.certificates import Authority

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = Authority.load(job)
    for warning in caught:
        _say(str(warning.message))
    return result


def _interface(cluster: LaunchCluster) -> str | None:
    """The interface over which the workers reach each other; None where that is not certain."""
    from paceline.communication.torch.store import LOOPBACK, is_local, own_address
    from paceline.errors import UnsupportedError

    if cluster.master is None:
        return interface_of(LOOPBACK)
    try:
        own = own_address(cluster.master[0])
    except UnsupportedError:
        return None
    if is_local(own) and not is_local(cluster.master[0]):  # host 0 knows its own name by a loopback address
        return None
    return interface_of(own)


def interface_of(address: str) -> str | None:
    """The name of this host's interface with the address; None if unknown."""
    wanted = ipaddress.ip_address(address.split("%")[0])
    try:
        if wanted.version == 6:
            return _interface_of_6(wanted.packed.hex())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    answer = fcntl.ioctl(sock.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                    if answer[20:24] == wanted.packed:
                        return name
    except OSError:
        pass
    return None


def _interface_of_6(digits: str) -> str | None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    return next((fields[5] for fields in lines if fields[0] == digits), None)


def _say(what: str) -> None:
    err().print(what, markup=False, soft_wrap=True)
