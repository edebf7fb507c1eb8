# SPDX-License-Identifier: Apache-2.0
"""Read the event logs of a run, sum it up, follow it live.

::

    events    the lines of a log
    log       RunLog and WorkerLog: what the files say
    read      log files -> RunLog
    summary   numbers as text
    live      log files that still grow -> numbers for a progress line

Figures and pages are in `paceline_plugins.report`. Nothing here is imported by the code that trains.
"""
