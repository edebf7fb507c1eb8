# SPDX-License-Identifier: Apache-2.0
"""`paceline revoke`: put workers of a running elastic run out, and accept their certificates no more."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import command_app, err, near, out, refuse
from paceline.errors import PacelineError
from paceline.flow.lock import Lock
from paceline_plugins.sites import revocations, saved_plan

LOOK_EVERY_S = 0.1
WAIT_S = 30.0
"""For the launcher's answer."""
REFUSED = 1
"""Exit code if the certificates are not revoked, or not yet."""


def command(
    run: Annotated[
        Path, typer.Argument(help="Log directory of the launcher that hosts the control plane.", show_default=False)
    ],
    workers: Annotated[
        list[int] | None,
        typer.Option("--worker", metavar="N", help="Its certificate, also of a lost one; as `paceline watch` counts."),
    ] = None,
    certificates: Annotated[
        list[Path] | None,
        typer.Option("--certificate", metavar="FILE", help="A cert.pem, also of one that has never joined."),
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="All certificates that have not joined yet: a job.pem was stolen.")
    ] = False,
    why: Annotated[str, typer.Option(help="Shown to the worker, to the others and in the log.")] = "by the operator",
) -> None:
    """Revoke certificates in a running elastic run.

    The control plane closes the connections of the workers that have them, gives their samples to the other workers,
    and refuses them from then on, also after `paceline run --again`. All workers that use the same certificate go.
    """
    if not (workers or certificates or unknown):
        refuse("nothing to revoke was named: give --worker N, --certificate FILE or --unknown")
    ids = [_id(path) for path in certificates or []]
    _check(run)
    try:
        name = revocations.post(run, revocations.Request(workers or [], ids, unknown, why))
    except OSError as error:
        refuse(f"cannot write a request into {run}: {error}; only who can write there can revoke")
    answer = _await(run, name, WAIT_S)
    if answer is None:
        err().print(_unanswered(run), markup=False, soft_wrap=True)
        raise typer.Exit(REFUSED)
    if "refused" in answer:
        err().print(f"refused: {answer['refused']}", markup=False, soft_wrap=True)
        raise typer.Exit(REFUSED)
    put_out = ", ".join(f"worker {one}" for one in answer["workers"]) or "no present worker"
    closed = "; certificates that have not joined before are refused" if unknown else ""
    out().print(f"revoked; put out: {put_out}{closed}", markup=False, soft_wrap=True)


def _id(path: Path) -> str:
    """The ID of a certificate's holder."""
    from paceline.communication.sockets.tls import TLS

    try:
        return TLS(path, path, path).identity.id
    except PacelineError as error:
        refuse(f"--certificate: {error}")


def _check(run: Path) -> None:
    """Refuse a run that has no control plane here, or no certificates."""
    if not run.is_dir():
        refuse(f"{run} is no directory: give the log directory of the launcher that hosts the elastic run")
    if not (run / saved_plan.NAME).is_file():
        refuse(
            f"{run} holds no elastic run (no {saved_plan.NAME}), and only an elastic run can revoke certificates while "
            "it trains: end a run of a fixed size, and start it again with a new job.pem"
        )
    try:
        plan, _ = saved_plan.read(run)
    except PacelineError as error:
        refuse(str(error))
    if not plan.leads:
        refuse(f"this launcher has joined the run at {plan.address}: revoke in the log directory of the launcher there")
    if plan.tls is None:
        refuse("this run has no certificates (--open), so nobody can be kept out: end it, and start it without --open")


def _await(run: Path, name: str, wait_s: float) -> dict[str, Any] | None:
    until = time.monotonic() + wait_s
    while (answer := revocations.answer_to(run, name)) is None and time.monotonic() < until and _runs(run):
        time.sleep(LOOK_EVERY_S)
    return answer if answer is not None else revocations.answer_to(run, name)


def _runs(run: Path) -> bool:
    try:
        with closing(Lock(run)):
            return False
    except PacelineError:
        return True


def _unanswered(run: Path) -> str:
    if _runs(run):
        return f"the launcher of {near(run)} has not answered yet; the request stays, and takes effect when it does"
    return f"no launcher runs in {near(run)}: the request takes effect with `paceline run --again {near(run)}`"


app = command_app(command)
