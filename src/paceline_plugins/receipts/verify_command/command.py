# SPDX-License-Identifier: Apache-2.0
"""`paceline verify`: check the receipts of a run, and make one of its blocks again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from paceline.cli.console import command_app, err, near, out, refuse
from paceline.cli.console.program_options import CONTEXT, Arguments, ProgramCommand
from paceline.cli.run.program import python_program
from paceline_plugins.receipts import seal
from paceline_plugins.receipts.audit import Findings, audit, find, holds_logs
from paceline_plugins.receipts.chain import Chain
from paceline_plugins.receipts.sealing import AUTHORITY, FOLDER

EPILOG = (
    "Exit codes: 0 all that was asked is shown to be right; 1 something is wrong; 2 something cannot be told: a seal "
    "or a chain is missing, the machine rounds otherwise, or the call is invalid."
)


class VerifyCommand(ProgramCommand):
    """Takes its options also between the run and the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the options that follow the run put in front of it."""
        takes_value = {name: not getattr(one, "is_flag", False) for one in self.get_params(ctx) for name in one.opts}
        if args and not args[0].startswith("-"):
            run, *rest = args
            options = list[str]()
            while rest and rest[0].startswith("-") and (name := rest[0].partition("=")[0]) in takes_value:
                options.append(rest.pop(0))
                if name == options[-1] and takes_value[name] and rest:
                    options.append(rest.pop(0))
            args = [*options, run, *rest]
        return super().parse_args(ctx, args)


def verify(
    run: Annotated[Path, typer.Argument(help="Log directory of the run, or its receipts.", show_default=False)],
    script: Annotated[
        Path | None, typer.Argument(help="With --block: the training program.", show_default=False)
    ] = None,
    arguments: Arguments = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The authority.pem that must have signed, from whoever began the run.",
            show_default=f"{AUTHORITY} beside the receipts",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(metavar="N", help="Make exchange N again with virtual workers, and compare the bits.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="With --block: where the run's steps are.", show_default="as the run says"),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="With --block: make all exchanges up to N again, without a checkpoint.")
    ] = False,
) -> None:
    """Check what a run with --receipts says of itself.

    Chains and seal are whole, all workers held one model after each merge, and each sample of each pass came exactly
    once. With --block a block is computed again from the checkpoint before it: silent corruption shows there.
    """
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    found = find(folder) if folder.is_dir() else []
    if not found or (folder == run and holds_logs(folder)):
        looked = f"looked for {near(run / FOLDER)}/rank-000.jsonl"
        refuse(f"{near(run)} holds no receipts ({looked}): begin a run with --receipts")
    for name, given in (("PROGRAM", script), ("--checkpoint", checkpoint), ("--from-start", from_start or None)):
        if given is not None and block is None:
            refuse(f"{name} is for a block that is made again: give --block N with it")
    if block is not None and script is None:
        refuse(f"--block makes an exchange again, and needs the program: paceline verify {run} --block {block} PROGRAM")
    if checkpoint is not None and from_start:
        refuse("--checkpoint names where to go on from, and --from-start goes on from nowhere: give one of them")
    findings = audit(folder, found, _fingerprint(authority, folder))
    if block is not None and script is not None and not findings.problems:
        _check_block(block, found)
        from paceline_plugins.receipts.verify_command.again import Again, make_again

        program = python_program(script, arguments, "--block runs Python programs inside one process")
        make_again(Again(block, program, "" if from_start else checkpoint), found, findings)
    _show(findings)
    raise typer.Exit(findings.code)


def _fingerprint(given: Path | None, folder: Path) -> str | None:
    """Of the key that must have signed; None if there is no certificate of it."""
    path = given if given is not None else folder.parent / AUTHORITY
    if given is None and not path.is_file():
        return None
    try:
        return seal.fingerprint_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"{near(path)} is no certificate of a run's authority: {error}")


def _check_block(block: int, found: list[Chain]) -> None:
    numbers = sorted(set().union(*(one.merges for one in found)))
    if block not in numbers:
        near_by = ", ".join(str(one) for one in sorted(numbers, key=lambda one: abs(one - block))[:2])
        there = f"merges from exchange {numbers[0]} to {numbers[-1]}; the nearest are {near_by}" if numbers else "none"
        refuse(f"--block {block}: the receipts have {there}")


def _show(findings: Findings) -> None:
    for text in findings.shown:
        out().print(f"right: {text}", markup=False, soft_wrap=True)
    for text in findings.open:
        err().print(Text(f"not told: {text}", style="yellow"), soft_wrap=True)
    for text in findings.problems:
        err().print(Text(f"wrong: {text}", style="bold red"), soft_wrap=True)


app = command_app(verify, cls=VerifyCommand, context_settings=CONTEXT, epilog=EPILOG)
