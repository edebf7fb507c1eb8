# SPDX-License-Identifier: Apache-2.0
"""The planner: how fast is a rule on a network, and what does it cost?

::

    network      links, hosts, presets, the doctor's measurements
    stragglers   the slowest of N workers
    workload     step times, sizes of the model
    timing       an exchange over a route, and the bytes that each link carries
    lockstep     blocks of workers that exchange together
    forecast     all of these, for a rule at N workers, and asynchronous workers on the simulated clock
    advice       a rule and a period, and why
    quality      what other numbers of workers learn from the samples of a run
    observed     a run's log, for that
    stopwatch    times the steps of a user's script
    table        for a terminal
"""

from __future__ import annotations

from paceline_plugins.forecast.planner.advice import Advice, of_auto, recommend
from paceline_plugins.forecast.planner.forecast import Forecast, forecast, forecasts
from paceline_plugins.forecast.planner.network import PRESETS, Network, NetworkLink, network_from_text
from paceline_plugins.forecast.planner.stragglers import LogNormal
from paceline_plugins.forecast.planner.workload import Workload

__all__ = [
    "PRESETS",
    "Advice",
    "Forecast",
    "LogNormal",
    "Network",
    "NetworkLink",
    "Workload",
    "forecast",
    "forecasts",
    "network_from_text",
    "of_auto",
    "recommend",
]
