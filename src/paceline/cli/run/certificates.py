# SPDX-License-Identifier: Apache-2.0
"""Who may come in: the certificates of a job, and the interfaces at which its workers listen."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import time
import warnings
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
    """What the workers are told: the folder of this host's certificate, and where torch's libraries may listen.

    Args:
        cluster: the shape of the run.
        tls: folder of cert.pem, key.pem and ca.pem, if any.
        in_the_clear: the workers have no certificate, whatever the launcher's own environment says.
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


def for_workers(cluster: LaunchCluster, directory: Path, job: Path | None, speaks: bool) -> Path | None:
    """The certificate of this host's workers where nobody has named one; None where none is needed, or none can be."""
    if os.environ.get("PACELINE_TLS") or (cluster.workers * cluster.hosts == 1 and job is None):
        return None
    return certificates(cluster, directory, job, cluster.hosts > 1, speaks)


def certificates(
    cluster: LaunchCluster, directory: Path, job: Path | None, joinable: bool, speaks: bool = True
) -> Path | None:
    """Make this host's certificate; the folder it is in, None where there is no authority to sign it.

    Host 0 makes the job's authority. Where other hosts belong to the job its secret is kept in one file, for them;
    where none can come it is never written at all.

    Args:
        cluster: the shape of the run.
        directory: of the logs.
        job: the job's file: host 0 makes it if it is not there, the others wait for it.
        joinable: whether other hosts belong to the job, or can join it.
        speaks: whether people have to know about the file.
    """
    place = directory / "door"
    folder = place / f"host-{cluster.host_index}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        place.chmod(0o700)
        if cluster.host_index == 0:
            authority: Authority | None = _first(place, job, joinable, speaks)
        else:
            authority = _further(job, cluster.timeout_s, speaks)
        if authority is None:
            return None
        authority.issue(folder, folder.name)
    except (PacelineError, OSError) as error:
        refuse(f"the job's certificates cannot be made: {error}")
    return folder


def _first(place: Path, job: Path | None, joinable: bool, speaks: bool) -> Authority:
    """The authority of the host where the job begins: a new one, or that of a file that is there."""
    from paceline.communication.sockets.certificates import Authority

    if job is not None and job.exists():
        found = _load(job)
    else:
        found = Authority.new()
        job = job if job is not None or not joinable else place / JOB
        if job is not None:
            found.export(job)
    if job is not None and speaks:
        shown = near(job)
        _say(f"for the other hosts: scp {shown} HOST:{JOB}, and there --job {JOB}; who has this file can join the job")
    return found


def _further(job: Path | None, timeout_s: float, speaks: bool) -> Authority | None:
    """The authority of host 0, in a file that it may still be about to make, where hosts share a disk."""
    if job is None:
        if speaks:
            _say(
                "without --job this host has no certificate, which connections of asynchronous rules need: copy "
                f"door/{JOB} from the log directory of host 0, or give --open on all hosts"
            )
        return None
    until = time.monotonic() + timeout_s
    if not job.exists():
        _say(f"waiting for {near(job)}, which host 0 makes at its start")
    while not job.exists() and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    return _load(job)


def say_open() -> None:
    """What `--open` means."""
    _say("--open: the workers' own connections are in the clear, and whoever reaches their ports can take part")


def check(tls: Path | None, job: Path | None, in_the_clear: bool) -> None:
    """Refuse wishes that exclude each other, and certificates that are not there or cannot be read."""
    named = [name for name, given in (("--tls", tls), ("--job", job), ("--open", in_the_clear)) if given]
    if len(named) > 1:
        refuse(f"{' and '.join(named)} exclude each other: give one of them")
    if tls is None:
        return
    from paceline.communication.sockets.tls import TLS

    try:
        TLS.folder(tls).server()
    except PacelineError as error:
        refuse(f"--tls: {error}")


def _load(job: Path) -> Authority:
    """What is in the file; a warning about it is a line of ours."""
    from paceline.communication.sockets.certificates import Authority

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Authority.load(job)
    for warning in caught:
        _say(str(warning.message))
    return found


def _interface(cluster: LaunchCluster) -> str | None:
    """The name of the interface over which the workers reach each other, where that is sure."""
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
    """The name of this host's interface that has the address; None where that cannot be found out."""
    wanted = ipaddress.ip_address(address.split("%")[0])
    try:
        if wanted.version == 6:
            return _interface_of_6(wanted.packed.hex())
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    said = fcntl.ioctl(sock.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                    if said[20:24] == wanted.packed:
                        return name
    except (ImportError, OSError):  # no Linux
        pass
    return None


def _interface_of_6(digits: str) -> str | None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    return next((fields[5] for fields in lines if fields[0] == digits), None)


def _say(what: str) -> None:
    err().print(what, markup=False, soft_wrap=True)
