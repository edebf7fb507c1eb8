# SPDX-License-Identifier: Apache-2.0
"""Read the event logs of a run, follow it live, draw its figures, write its report.

::

    events    what stands on the lines of a log
    log       RunLog and WorkerLog: what the files say
    read      log files -> RunLog
    curves    RunLog -> points to draw (loss by samples, loss by time, bytes, delays)
    summary   RunLog -> the numbers of a run on one line, and what to worry about
    tables    those numbers and those of workers and sources, in rows
    canvas    the look of every picture
    figures   points -> pictures (needs the extra `paceline[report]`)
    page      numbers and pictures -> one HTML page
    folding   a log of any length in bounded memory
    clocks    the clocks of several hosts as one, by what exchanges tell
    spans     WorkerLog -> events of a timeline
    trace     directory -> one timeline of all workers, for Perfetto
    report    directories -> report.html and the pictures beside it
    live      log files that still grow -> numbers for a progress line

Nothing here is imported by the code that trains.
"""
