# SPDX-License-Identifier: Apache-2.0
"""The doctor: whether a cluster is fit for training, before it trains.

::

    measured   the measurements, as dataclasses
    machine    examines the worker's own machine
    wire       JSON messages over plain sockets, with deadlines
    probe      one worker's part in an examination
    judge      measurements -> findings, each with advice; pure
    show       terminal and JSON
"""
