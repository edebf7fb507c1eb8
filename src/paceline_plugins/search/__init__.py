# SPDX-License-Identifier: Apache-2.0
"""Searches for settings on a running cluster."""
