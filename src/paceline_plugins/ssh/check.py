# SPDX-License-Identifier: Apache-2.0
"""The check of all hosts at once before anything trains: every trouble of every host, and what to do."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from paceline import __version__
from paceline_plugins.ssh.client import CONNECT_S
from paceline_plugins.ssh.far_end import REACH_S
from paceline_plugins.ssh.hosts import Host
from paceline_plugins.ssh.link import Links
from paceline_plugins.ssh.program_files import MOST_BYTES, MOST_FILES, ProgramFiles

HELLO_S = CONNECT_S + 5.0
ANSWER_S = 30.0
"""For a check on a host: Python has to find torch there, on a slow disk perhaps."""
SPARE_BYTES = 256 << 20
"""Free space that is left on the disk of a host after the program was brought."""


@dataclass(frozen=True)
class Plan:
    """What the check found for one host."""

    directory: str  # where its workers run
    # the files of the program to be brought there first; None: it runs in its own directory
    bring: list[str] | None = None


def greetings(links: Links) -> dict[int, Mapping[str, Any]]:
    """What the hosts say of themselves, once ssh has connected to them."""
    hello = links.wait_for("hello", range(len(links.hosts)), HELLO_S)
    one_machine(links, hello)
    return hello


def programs(links: Links, hello: Mapping[int, Mapping[str, Any]], program: ProgramFiles) -> dict[int, Plan]:
    """The plan for each host that has no trouble; the troubles of the other ones are noted in `links`."""
    asked = {
        index: {
            "directory": links.hosts[index].directory or str(program.base),
            "program": program.path,
            "files": program.sums,
            "copy": program.copy,
            "environment": dict(links.hosts[index].environment),
        }
        for index in links.well
    }
    answers = links.ask("check", asked, ANSWER_S)
    plans = {}
    for index, said in answers.items():
        if "error" in said:
            links.trouble(index, f"the check failed there: {said['error']}")
            continue
        host, python = links.hosts[index], hello[index]["python"]
        if is_origin(links, index):  # files may change while they are compared, such as this command's own output
            said = {**said, "differ": []}
        for text in [*versions(host, python, said["versions"]), *_program(host, said, program)]:
            links.trouble(index, text)
        here = said["directory"] and not said["differ"]
        plans[index] = Plan(str(asked[index]["directory"])) if here else Plan(said["copy"], list(said["copy_differs"]))
    return plans


def is_origin(links: Links, index: int) -> bool:
    """Whether a host is this machine, and runs the program where it lies."""
    return links.links[index].is_here and links.hosts[index].directory is None


def one_machine(links: Links, hello: Mapping[int, Mapping[str, Any]]) -> None:
    """Two names of one machine are one host: their workers would share its devices."""
    seen: dict[tuple[str, ...], int] = {}
    for index, said in sorted(hello.items()):
        first = seen.setdefault(tuple(said["machine"]), index)
        if first != index:
            other = links.hosts[first].name
            links.trouble(index, f"it is the same machine as {other}: name it once, and start more with --workers")


def versions(host: Host, python: list[str], found: Mapping[str, str]) -> list[str]:
    """What is wrong with paceline and torch there, compared with this machine's."""
    torch_here = metadata.version("torch")  # torch itself loads for seconds
    command, name = shlex.quote(python[0]), shlex.quote(f"paceline=={__version__}")
    remedy = f"ssh {host.destination} {command} -m pip install {name}"
    remedy += f', or name another Python: [hosts.{host.name}] python = "..." in paceline.toml'
    if "paceline" not in found:
        why = str(found.get("why", "")).strip()
        return [f"its Python ({python[0]}, {python[1]}) has no paceline{f' ({why})' if why else ''}: {remedy}"]
    troubles = []
    if found["paceline"] != __version__:
        troubles.append(f"it has paceline {found['paceline']}, and this machine has {__version__}: {remedy}")
    here = torch_here.partition("+")[0]
    if "torch" not in found:
        troubles.append(f"its Python ({python[0]}) has no torch: install torch {here} there, as this machine has it")
    elif found["torch"].partition("+")[0] != here:
        troubles.append(
            f"it has torch {found['torch']}, and this machine has {torch_here}: install the same on both; other "
            "versions give other numbers, and may not understand each other"
        )
    return troubles


def _program(host: Host, said: Mapping[str, Any], program: ProgramFiles) -> list[str]:
    """What is wrong with the program and its directory there."""
    directory = host.directory or str(program.base)
    if not said["directory"] and (host.directory is not None or not program.sums):
        return [f"it has no directory {directory}: make it, or name another with [hosts.{host.name}] directory"]
    if not program.sums:
        there = said["program"] or not program.path
        return [] if there else [f"it has no {program.path}: install it there as here"]
    if not said["differ"]:
        return []
    what = _differs(said, program, directory)
    if program.too_much:
        return [
            f"{what}, and {program.too_much}, of which at most {MOST_BYTES >> 20} MiB in {MOST_FILES} files are "
            "copied: put the program into a folder of its own, or copy it there yourself (rsync)"
        ]
    if said["free"] < MOST_BYTES + SPARE_BYTES:
        return [f"{what}, and its disk has {said['free'] >> 20} MiB left at {said['copy']}: make room there"]
    return []


def _differs(said: Mapping[str, Any], program: ProgramFiles, directory: str) -> str:
    if not said["directory"]:
        return f"it has no directory {directory}"
    if not said["program"]:
        return f"it has no {program.path} in {directory}"
    some = ", ".join(said["differ"][:3]) + (", ..." if len(said["differ"]) > 3 else "")
    return f"in its {directory} other files than here: {some}"


def meeting(links: Links, hello: Mapping[int, Mapping[str, Any]], asked: tuple[str, int] | None) -> tuple[str, int]:
    """Where the hosts meet: an address of host 0 and a free port there, tried from every other host.

    Args:
        links: to the hosts.
        hello: what the hosts said at first.
        asked: of `--master`; None: found here.
    """
    address = asked[0] if asked is not None else address_of_0(links, hello)
    port = asked[1] if asked is not None else 0
    token = secrets.token_hex(16)
    said = links.ask("listen", {0: {"address": address, "port": port, "token": token}}, ANSWER_S).get(0, {})
    if "error" in said:
        links.trouble(0, f"it cannot listen at port {port} ({said['error']}): name another with --master HOST:PORT")
    if "port" not in said:
        return address, port
    port = int(said["port"])
    others = {index: {"address": address, "port": port, "token": token} for index in range(1, len(links.hosts))}
    for index, answer in links.ask("reach", others, ANSWER_S + REACH_S).items():
        if "error" in answer:
            links.trouble(index, _unreached(links.hosts[0], address, port, str(answer["error"]), asked is not None))
    return address, port


def address_of_0(links: Links, hello: Mapping[int, Mapping[str, Any]]) -> str:
    """The address of host 0 for the other hosts: its own setting, or one by which ssh's connections go."""
    host = links.hosts[0]
    if host.address is not None:
        return host.address
    if links.links[0].is_here:  # as the first host elsewhere sees this machine
        return str(hello[1]["near_address"] or host.name)
    return str(hello[0]["address"] or host.name)


def _unreached(first: Host, address: str, port: int, error: str, asked: bool) -> str:
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    remedy = f'name an address that it reaches: [hosts.{first.name}] address = "..." in paceline.toml'
    remedy = "correct --master" if asked else remedy
    return (
        f"it does not reach {first.name} at {where} ({error}): open the ports of both for each other in the firewall "
        f"(sudo ufw allow from ADDRESS), or {remedy}"
    )
