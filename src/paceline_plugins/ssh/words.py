# SPDX-License-Identifier: Apache-2.0
"""The command of each host's launcher, and the names of hosts and ranks in what is shown and written."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import typer

from paceline.cli.console import settings_file
from paceline.cli.launch.cluster import address_text
from paceline_plugins.ssh import client
from paceline_plugins.ssh.hosts import Host
from paceline_plugins.ssh.program_files import ProgramFiles

OWN = ("hosts", "host_index", "master", "job", "log", "overwrite", "workers", "quiet", "print_only", "module",
       "elastic", "grace")  # fmt: skip
"""Options that the near end uses itself, or sets for each host."""


def same_on_all(ctx: typer.Context) -> list[str]:
    """The options of this command that every host's launcher gets, also those that a file sets."""
    found: list[str] = []
    for option in ctx.command.params:
        name = option.name or ""
        source = ctx.get_parameter_source(name)
        if option.param_type_name == "option" and name not in OWN and source is not None and source.name != "DEFAULT":
            found += settings_file.as_typed(option.opts[0], ctx.params[name])
    return found


FIRST = -1
"""Stands for the launcher of the first host, where a rank is asked for."""


def of_host(
    hosts: Sequence[Host], index: int, options: Sequence[str], meet: str | None, elastic: Sequence[str] = ()
) -> list[str]:
    """The options of `paceline run` on one host, without those of the files that the far end makes.

    Args:
        hosts: all.
        index: of this one.
        options: of `same_on_all`.
        meet: the address where the hosts meet; None with one host.
        elastic: the options of the launcher that hosts an elastic run, the first one; empty in other runs.
    """
    words = ["run", *options, "--workers", str(hosts[index].workers or 1), "--overwrite"]
    words += [] if elastic and index == 0 else ["--quiet"]  # that one says what happens to members
    where = [] if meet is None else [meet]
    if elastic:
        words += ["--join", *where] if index else [*elastic, *(["--listen", *where] if where else [])]
    else:
        words += ["--hosts", str(len(hosts))]
        words += ["--host-index", str(index), "--master", *where] if where else []
    return words


def said_by(index: int) -> str:
    """The files, below `output`, in which a host's launcher says how it ended: without the suffix."""
    return f"host-{index:03d}"


def label(hosts: Sequence[Host]) -> dict[int, str]:
    """What stands before the lines of each rank: its host and itself."""
    return {FIRST: hosts[0].name} | {rank: f"{host.name} {rank}" for rank, host in enumerate(by_rank(hosts))}


def by_rank(hosts: Sequence[Host]) -> list[Host]:
    """The host of each rank."""
    return [host for host in hosts for _ in range(host.workers or 1)]


def shown(
    hosts: Sequence[Host],
    options: Sequence[str],
    program: ProgramFiles,
    master: tuple[str, int] | None,
    secret: bool,
    elastic: Sequence[str] = (),
) -> str:
    """What would be started, for `--print`: no host is asked, so nothing is known of its directory."""
    meet = master or (hosts[0].address or f"({hosts[0].name}'s address)", 0)
    text = [f"{len(hosts)} hosts, {len(by_rank(hosts))} workers; the hosts meet at {_where(meet)}"]
    for index, host in enumerate(hosts):
        here = client.is_here(host)
        directory = host.directory or str(program.base)
        words = of_host(hosts, index, options, _typed(meet) if len(hosts) > 1 else None, elastic)
        own = ["--log", "LOGS", *(["--job", "JOB_FILE"] if secret else [])]
        line = [host.python or "python3", "-m", "paceline", *words, *own, *program.words]
        text.append(f"\n{host.name}{' (this machine)' if here else ''}, in {directory}")
        over = [] if here else client.command(host, "")[:-1]
        far = f"cd {shlex.quote(directory)} && {shlex.join(line)}"  # ssh joins its words, and a shell splits them
        text.append(f"  {shlex.join([*over, far] if over else line)}")
        text += [f"  {name}=(as the settings say)" for name in host.environment]
    if program.sums:
        kept, what = len(program.sums), program.path or "the module"
        files = f"{kept} file{'s' if kept > 1 else ''}"
        text.append(f"\nwhere {what} is missing or differs, {files} of {program.base} would be copied")
    return "\n".join(text)


def _typed(address: tuple[str, int]) -> str:
    """As in a command: what is not known is a word in capitals."""
    host = "ADDRESS" if address[0].startswith("(") else address[0]
    return address_text(host, address[1]) if address[1] else f"{host}:PORT"


def _where(address: tuple[str, int]) -> str:
    return address_text(*address) if address[1] else f"{address[0]}:(a free port)"
