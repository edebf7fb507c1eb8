# SPDX-License-Identifier: Apache-2.0
"""`paceline run`: a program on N workers of this host, or of several hosts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import err, refuse, settings_file
from paceline.cli.console.program_options import (
    Arguments,
    AsIs,
    ForceZeroLines,
    Log,
    Master,
    Module,
    Overwrite,
    Quiet,
    RandomData,
    RuleText,
    Timeout,
)
from paceline.cli.launch.forks import fork_server
from paceline.cli.run import certificates, checks, dry_run, ended_file, fixed, start
from paceline.cli.run.conclusion import conclude
from paceline.cli.run.elastic import ElasticOptions, print_plan, resume_run, start_run
from paceline.cli.run.hosts import HostOptions, job_log_directory, refuse_several_launchers, resolve_cluster
from paceline.cli.run.program import find
from paceline.cli.run.tracking import (
    CheckpointOption,
    MetricsOption,
    TensorboardOption,
    TrackingOptions,
    WandbOption,
)
from paceline_plugins.mpi import under_mpi
from paceline_plugins.receipts.sealing import WriteReceipts, make_seal, refuse_unserved
from paceline_plugins.sites import sites
from paceline_plugins.ssh import options as ssh
from paceline_plugins.ssh.hosts import are_names as hosts_by_name
from paceline_plugins.zero import run_option as zero_lines

EPILOG = (
    "Any other supervisor can start a worker of an elastic run as well: the program, without RANK and WORLD_SIZE, "
    "with PACELINE_CONTROL=HOST:PORT (where the control plane listens) and PACELINE_TLS=FOLDER (with cert.pem, key.pem "
    "and ca.pem of the job). A worker that ends with exit code 75 was declared lost, and a new one may start; with 85, "
    "as a launcher, it has left in order."
)


def run(
    ctx: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(
            help="The training program: Python, any executable, or with -m a module of Python.", show_default=False
        ),
    ] = None,
    arguments: Arguments = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers; with several hosts, on each host.", show_default="1")
    ] = None,
    rule: RuleText = None,
    log: Log = None,
    overwrite: Overwrite = False,
    timeout: Timeout = 600.0,
    hosts: ssh.Hosts = None,
    bring: ssh.Bring = True,
    host_index: Annotated[
        int | None,
        typer.Option(help="Which of the hosts this is, from 0; ranks follow it.", show_default="0, or as Slurm says"),
    ] = None,
    master: Master = None,
    tls: Annotated[
        Path | None, typer.Option(help="Folder of cert.pem, key.pem and ca.pem, instead of certificates for the job.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="File of the job's secret: host 0 writes it; copy or share it with other hosts.")
    ] = None,
    in_the_clear: Annotated[
        bool, typer.Option("--open", help="No certificates: connections of asynchronous rules are not encrypted.")
    ] = False,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Elastic run: fewest and most workers, of all hosts together; few train at first if the rule has "
            "grow='auto'.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --elastic: an address of this host for other hosts to join."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join the elastic run whose launcher listens there.")
    ] = None,
    invite: sites.Invite = False,
    public: sites.Public = None,
    relay: sites.Relay = None,
    grace: Annotated[
        float | None, typer.Option(help="With --elastic: seconds after which an exchange calls in stragglers.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Continue the elastic run of a killed launcher.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="How often to restart all workers when one fails, to resume from a checkpoint.")
    ] = 0,
    as_is: AsIs = False,
    random_data: RandomData = False,
    module: Module = False,
    force_zero_lines: ForceZeroLines = False,
    receipts: WriteReceipts = False,
    tensorboard: TensorboardOption = None,
    wandb: WandbOption = None,
    metrics: MetricsOption = None,
    checkpoint: CheckpointOption = None,
    transport: Annotated[
        str,
        typer.Option(
            help="How the workers exchange: auto (torch.distributed), channel (rings over paceline's sockets) or mpi "
            "(under mpiexec)."
        ),
    ] = "auto",
    quiet: Quiet = False,
    print_only: Annotated[
        bool,
        typer.Option("--print", "--dry-run", help="Print the commands of this and other hosts, and start nothing."),
    ] = False,
) -> None:
    """Run a training program on several workers.

    The program is Python, or any executable (ELF, or a script with #!), which attaches by paceline's C library.
    """
    ending = ended_file.take()
    if again is not None:
        checks.refuse_other_options(ctx, "again", "quiet")
        raise typer.Exit(resume_run(checks.existing_directory(again), quiet))
    if not quiet:
        settings_file.announce(ctx)
    is_elastic = elastic is not None or join is not None
    named, count = hosts_by_name(hosts), ssh.count(hosts)
    checks.check_elastic_options(is_elastic, count or 1, restarts, listen, grace)
    sites.check_elastic(elastic is not None, invite, public, relay)
    program = None if script is None else find(script, arguments, module)
    if program is None and (elastic is None or workers != 0):
        refuse("no program was given: paceline run [OPTIONS] PROGRAM [ARGUMENTS]")
    tracking = TrackingOptions(tensorboard, wandb, metrics, checkpoint)
    tracking.check(program)
    options = zero_lines.ZeroLineOptions(as_is, force_zero_lines, random_data)
    security = certificates.Security(tls, job, in_the_clear)
    security.check()
    asked_hosts = HostOptions(workers, count, host_index, master)
    if named and program is not None:
        if is_elastic:
            zero_lines.refuse_elastic(program, options)
        bare = not is_elastic and zero_lines.serves(program, options, 2)
        raise typer.Exit(ssh.run(ctx, program, asked_hosts, security, timeout, bare))
    mpi_process = None if is_elastic else under_mpi.process(asked_hosts)
    transport = under_mpi.check_transport(transport, mpi_process, is_elastic)
    refuse_unserved(receipts, is_elastic, mpi_process is not None)
    if is_elastic or mpi_process is not None:
        checks.check_rule(rule, is_elastic)
    if is_elastic:
        zero_lines.refuse_elastic(program, options)
        if elastic is not None:
            refuse_several_launchers()
        here = 1 if workers is None else workers
        places = sites.options(invite, public, relay, listen, security, print_only, here)
        asked = ElasticOptions(elastic, join, listen, here, rule, timeout, grace, places, tracking.environment())
        if print_only:
            return print_plan(asked, program, log, security)
        raise typer.Exit(start_run(asked, program, options, log, overwrite, security, quiet))
    assert program is not None
    if mpi_process is not None:
        passed_on = under_mpi.RunOptions(
            rule, log, overwrite, timeout, transport, quiet, restarts, print_only, tracking
        )
        raise typer.Exit(under_mpi.run(mpi_process, program, options, passed_on, security))
    cluster, scheduler = resolve_cluster(asked_hosts, timeout)
    bare = zero_lines.serves(program, options, cluster.size)
    if bare:
        tracking.check_zero_lines(restarts)
    command = program.command(bare)
    log = log or job_log_directory(scheduler)
    variables = zero_lines.environment(cluster, bare, random_data) | start.chosen_transport(transport)
    variables |= tracking.environment()
    if print_only:
        checks.check_rule(rule)
        directory = dry_run.log_directory(log)
        added = start.environment(cluster, rule, directory) | dry_run.environment(cluster, security, directory)
        return dry_run.run(ctx, cluster, scheduler, command, added | variables, directory)
    if not quiet:
        err().print(f"starting {start.count(cluster)} of {program.name}", markup=False)
    # before the launcher loads torch to check the rule: both load it at the same time
    with fork_server(start.loaded(cluster) | variables if bare else None) as forks:
        announces = checks.check_rule(rule) and not quiet
        checks.free_port(cluster)
        checks.warn_oversubscription(cluster.workers, quiet)
        directory = checks.log_directory(log, cluster, overwrite)
        added = fixed.environment(cluster, rule, directory, security, announces)
        sign = fixed.signing(cluster, directory, security, announces)
        seal = make_seal(receipts, cluster, directory, sign, security.job)
        if seal is not None:
            seal.begin(quiet)
            added |= seal.environment
        started = time.monotonic()
        outcome = fixed.launch(cluster, command, added | variables, directory, quiet, restarts, bare, sign, forks)
        ended_file.write(ending, outcome)
        code = conclude(outcome, cluster, directory, time.monotonic() - started, quiet)
        if seal is not None:
            code = seal.seal(code, [worker.rank for worker in outcome.workers])
    if code == 0 and zero_lines.work_not_shared(directory, options, program, cluster.size, rule):
        code = 1
    fixed.leave(code, outcome)
