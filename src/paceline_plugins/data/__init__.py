# SPDX-License-Identifier: Apache-2.0
"""Packed data sets, caches and their commands."""
