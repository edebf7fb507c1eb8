# SPDX-License-Identifier: Apache-2.0
"""The command `paceline`: run a program on many workers, report on a run, explain a rule.

::

    run        the command; workers.py starts and stops them, lines.py shows what they print,
               status.py draws the bottom line, failure.py says what went wrong
               elastic_run.py leads an elastic run: elastic.py hosts or joins the control plane,
               supervise.py replaces who dies, process.py and keeper.py are one worker, kept.py is
               what the next launcher has to know; restarts.py starts all again
               hosts.py finds the hosts, dry.py is `--print`
    report     logs -> page, pictures and a short table
    explain    a recipe's five choices, equation, defaults and bytes
    data       pack samples into shards, verify them, plan a storage
    sim        a program under virtual workers in one process
    plan       how fast, how dear and how much on the wire, before anything is rented
    lightrnn, dual   the wings' own commands
    console    where all of them print
"""

from __future__ import annotations

from paceline.cli.main import app

__all__ = ["app"]
