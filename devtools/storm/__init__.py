# SPDX-License-Identifier: Apache-2.0
"""Storms: simulated runs under faults that a seed draws, and what is checked of them."""
