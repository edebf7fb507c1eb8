# SPDX-License-Identifier: Apache-2.0
"""The measurements of `benchmarks/speed/data.py`, one file for each part of the data service."""
