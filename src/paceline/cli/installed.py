# SPDX-License-Identifier: Apache-2.0
"""Commands that plugins and other distributions add to `paceline`: entry points of the group `paceline.commands`.

The entry point's name is the command's name, and its object is a Typer app or a click command. `paceline --help` shows
the summary of the distribution, so that a command is imported only when it is called. Commands of paceline itself take
precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.console import refuse

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "paceline.commands"
PACKAGES = {"lightrnn": "paceline-lightrnn", "dual": "paceline-dual", "config": "paceline-c"}
"""Command -> distribution, of those that are developed with paceline."""
GROUPS = (("Train", ("run", "sim", "watch", "report")), ("Choose", ("plan", "explain", "doctor")))
"""What `paceline --help` shows one by one."""


def installed_commands() -> dict[str, list[EntryPoint]]:
    """Command -> the entry points of that name, by name."""
    from importlib.metadata import entry_points  # takes 20 ms

    result: dict[str, list[EntryPoint]] = {}
    for one in sorted(entry_points(group=GROUP), key=lambda one: (one.name, distribution(one))):
        result.setdefault(one.name, []).append(one)
    return result


def _is_ours(entry: EntryPoint) -> bool:
    """Whether it is a plugin's in paceline's own wheel."""
    return distribution(entry) == "paceline"


def distribution(entry: EntryPoint) -> str:
    """The name of an entry point's distribution."""
    return entry.dist.name if entry.dist is not None else "an unnamed distribution"


class Commands(TyperGroup):
    """The commands of the core, those of the plugins in paceline's wheel, and those of other distributions."""

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        return installed_commands()

    @cached_property
    def _own(self) -> dict[str, Any]:
        """Commands of paceline itself: name -> the command, or the entry point of a plugin's."""
        plugins = {name: one for name, entries in self._offered.items() for one in entries if _is_ours(one)}
        own = {**plugins, **self.commands}
        order = [name for _, names in GROUPS for name in names]
        return {
            name: own[name] for name in sorted(own, key=lambda name: (name not in order, [*order, name].index(name)))
        }

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of `paceline --help`."""
        return [*self._own, *(name for name in self._offered if name not in self._own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; None if neither paceline nor a distribution has it."""
        own = super().get_command(ctx, cmd_name) or self._of_plugin(cmd_name)
        if own is not None:
            for option in own.params:  # docs/guide/run.md says how they are named, once
                vars(option)["show_envvar"] = False
            return own
        entries = self._offered.get(cmd_name, [])
        return Installed(cmd_name, entries) if entries or cmd_name in PACKAGES else None

    @property
    def own(self) -> list[str]:
        """Names of the commands of paceline itself."""
        return list(self._own)

    def _of_plugin(self, name: str) -> Any:
        """A plugin's command, with the settings of `paceline` as the core's have them; None if there is none."""
        if name not in self._own:
            return None
        command = typer.main.get_command(self._own[name].load())
        vars(command)["name"] = name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands in groups; of those that few people use, the names."""
        for title, names in GROUPS:
            shown = [(name, self.get_command(ctx, name)) for name in names if name in self._own]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(100)) for name, one in shown])
        more = [name for name in self._own if all(name not in names for _, names in GROUPS)]
        others = [(name, self.get_command(ctx, name)) for name in self._offered if name not in self._own]
        with formatter.section("More"):
            formatter.write_dl([(", ".join(more), "see paceline COMMAND --help")])
            if others:
                formatter.write_dl([(name, one.get_short_help_str(100)) for name, one in others])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of the system, such as a name that is too long, ends it with one sentence."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `paceline report | head`: click ends it
            raise
        except (OSError, UnicodeError) as error:
            refuse(str(error))


class Installed(TyperCommand):
    """A command of another distribution, imported when it is called.

    Args:
        name: of the command.
        entries: the entry points of that name; only one can be called.
    """

    def __init__(self, name: str, entries: Sequence[EntryPoint]) -> None:
        super().__init__(name, add_help_option=False)
        self._entries = entries

    def get_short_help_str(self, limit: int = 45) -> str:
        """The distribution's summary, or why the command cannot be called."""
        if len(self._entries) > 1:
            return f"cannot be called: {self._owners()} have it"
        summary = self._entries[0].dist.metadata["Summary"] if self._entries and self._entries[0].dist else None
        text = " ".join((summary or "").split())
        return text if len(text) <= limit else f"{text[: max(0, limit - 3)].rsplit(' ', 1)[0]}..."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all arguments, also `--help`, to the command itself."""
        ctx.args = list(args)
        return []

    def invoke(self, ctx: Any) -> None:
        """Import the command and run it."""
        self.loaded().main(args=ctx.args, prog_name=ctx.command_path)

    def loaded(self) -> Any:
        """The click command; refuses one that is not installed, has two distributions, or cannot be imported."""
        name = str(self.name)
        if not self._entries:
            package = PACKAGES[name]
            where = f"pip install {package} (in a checkout: ./packages/{package.removeprefix('paceline-')})"
            refuse(f"paceline {name} is a command of {package}, which is not installed: {where}")
        if len(self._entries) > 1:
            refuse(f"paceline {name}: {self._owners()} have a command of this name; uninstall all but one of them")
        (entry,) = self._entries
        try:
            result = entry.load()
        except Exception as error:  # of the imported module
            reason = f"{type(error).__name__}: {error}"
            refuse(f"paceline {name}: {distribution(entry)} has this command, and {entry.value} fails with {reason}")
        command = typer.main.get_command(result) if isinstance(result, typer.Typer) else result
        if not callable(getattr(command, "main", None)):
            refuse(f"paceline {name}: {distribution(entry)} has to give a command, and gives a {type(result).__name__}")
        return command

    def _owners(self) -> str:
        return " and ".join(distribution(entry) for entry in self._entries)
