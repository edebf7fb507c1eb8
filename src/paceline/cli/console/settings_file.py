# SPDX-License-Identifier: Apache-2.0
"""Options of the commands in a file, so that a team need not type them.

`paceline.toml`, or `[tool.paceline]` in `pyproject.toml`, of the working directory or the nearest folder above it that
has one. Keys are names of options without the dashes: those of `paceline run` at the top, or in a table `[run]`, those
of other commands in a table of the command's name. A command line overrides an environment variable
(`PACELINE_RUN_WORKERS`, by command and option), this overrides the file, and the file the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from paceline.cli.console import near
from paceline.core.parse import like
from paceline.errors import UnsupportedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME, PYPROJECT = "paceline.toml", "pyproject.toml"
MAIN = "run"
"""The command whose options may stand at the top."""
HOSTS = "hosts"
"""The table of tables that describe machines, a table a machine; not a command."""
EAGER = ("help", "version", "install-completion", "show-completion")


@dataclass(frozen=True)
class SettingsFile:
    """What a file sets.

    Attributes:
        path: of the file.
        values: parameter -> value, by command.
        hosts: tables `[hosts.NAME]` of `paceline run --hosts`, by name, as they stand there.
    """

    path: Path
    values: Mapping[str, Mapping[str, Any]]
    hosts: Mapping[str, Any] = field(default_factory=dict)


def find(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest file with settings at or above a folder, and what it says; None if there is none.

    Raises:
        UnsupportedError: the file is no TOML, or cannot be read.
    """
    for place in (folder, *folder.parents):
        own, project = place / NAME, place / PYPROJECT
        if own.is_file():
            return own, _read(own)
        if project.is_file() and "tool.paceline" in project.read_text(encoding="utf-8", errors="replace"):
            table = _read(project).get("tool", {}).get("paceline")
            if table is not None:
                return project, table
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path} cannot be read as TOML: {error}; correct it") from error


def options(command: Any) -> dict[str, Any]:
    """The options that a file may set, by their name there."""
    result = {}
    for one in command.params:
        names = [name[2:] for name in one.opts if name.startswith("--")]
        if one.param_type_name == "option" and names and names[0] not in EAGER:
            result[names[0]] = one
    return result


def as_typed(name: str, value: Any) -> list[str]:
    """An option as it is typed; nothing for a flag that is off."""
    return [] if value is False else [name] if value is True else [name, f"{value}"]


def load(folder: Path, commands: Sequence[str], command: Callable[[str], Any]) -> SettingsFile | None:
    """The settings that hold in a folder; None if no file has any.

    Args:
        folder: the working directory.
        commands: names of all of paceline's.
        command: the command of a name, which is imported then.

    Raises:
        UnsupportedError: the file has an unknown command or option, or a value of another type.
    """
    result = find(folder)
    if result is None:
        return None
    path, table = result
    if not isinstance(table, Mapping):
        raise UnsupportedError(f"{path}: tool.paceline is a table of settings, got {table!r}")
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    hosts = tables.pop(HOSTS, {})
    top = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    twice = sorted(top.keys() & tables.get(MAIN, {}).keys())
    if twice:
        raise UnsupportedError(f"{path} sets {twice[0]} at the top and in [{MAIN}], which are the same: leave one out")
    tables[MAIN] = {**top, **tables.get(MAIN, {})}
    unknown = [name for name in tables if name not in commands]
    if unknown:
        raise UnsupportedError(f"{path}: [{unknown[0]}] is no command of paceline{like(unknown[0], list(commands))}")
    values = {name: dict(_checked(path, name, command(name), tables[name])) for name in tables}
    return SettingsFile(path, values, hosts)


def _checked(path: Path, name: str, command: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameters of a command and their values."""
    known = options(command)
    for key, value in given.items():
        if key not in known:
            raise UnsupportedError(f"{path}: {key} is no option of paceline {name}{like(key, list(known))}")
        option = known[key]
        if isinstance(value, list) and value and not option.multiple and all(isinstance(one, str) for one in value):
            value = ",".join(value)  # as it is typed: --hosts a,b
        several = option.multiple and isinstance(value, list)
        kinds = (bool,) if option.is_flag else (int, float, str)
        for one in value if several else [value]:
            if isinstance(one, kinds) and isinstance(one, bool) == option.is_flag:
                continue
            wanted = "true or false" if option.is_flag else "a number or a text"
            raise UnsupportedError(f"{path}: {key} of paceline {name} is {wanted}, got {value!r}")
        words = value if option.is_flag else [f"{one}" for one in value] if several else f"{value}"
        try:
            option.process_value(typer.Context(command), words)
        except typer.BadParameter as error:
            raise UnsupportedError(f"{path}: {key} of paceline {name}: {error.message}") from error
        yield option.name, words


def named(ctx: typer.Context) -> str:
    """` with the settings of paceline.toml` where a file sets options of this command, for messages."""
    result = ctx.find_object(SettingsFile)
    return f" with the settings of {near(result.path)}" if result and result.values.get(str(ctx.info_name)) else ""
