# SPDX-License-Identifier: Apache-2.0
"""The doctor: whether a cluster is fit for training, before it trains.

::

    measured   the measurements, as dataclasses
    machine    examines the worker's own machine
    wire       JSON messages over plain sockets, with deadlines
    probe      one worker's part in an examination
    judge      measurements -> findings, each with advice; pure
    show       terminal, picture, page, JSON
"""

from __future__ import annotations

from paceline_plugins.forecast.doctor.finding import Finding
from paceline_plugins.forecast.doctor.judge import fit, judge
from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, Measurements
from paceline_plugins.forecast.doctor.probe import Probe, ProbeCoordinates, coordinates_from

__all__ = [
    "Finding",
    "Machine",
    "MeasuredLink",
    "Measurements",
    "Probe",
    "ProbeCoordinates",
    "coordinates_from",
    "fit",
    "judge",
]
