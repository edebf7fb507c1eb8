# SPDX-License-Identifier: Apache-2.0
"""Forecasts: the planner, the doctor, and vectorised simulation."""
