# SPDX-License-Identifier: Apache-2.0
"""Read the event logs of a run, follow it live, draw its figures, write its report.

::

    events    the lines of a log
    log       RunLog and WorkerLog: what the files say
    read      log files -> RunLog
    curves    RunLog -> points to draw (loss by samples, loss by time, bytes, delays)
    summary   RunLog -> the numbers of a run on one line, and what to worry about
    tables    those numbers and those of workers and sources, in rows
    charts    points -> charts, as data for a browser
    sections  numbers, tables and charts -> the sections of a page
    chart_page  sections and charts -> one HTML document
    report    directories -> the page as a file
    follow    log files that still grow -> RunLog
    live_page the page of a run that still trains, over HTTP
    page, canvas  the look of pages and of pictures with matplotlib, also for other commands
    folding   a log of any length in bounded memory
    clocks    the clocks of several hosts as one, by what exchanges tell
    spans     WorkerLog -> events of a timeline
    trace     directory -> one timeline of all workers, for Perfetto
    live      log files that still grow -> numbers for a progress line

Nothing here is imported by the code that trains.
"""
