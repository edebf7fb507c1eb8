# SPDX-License-Identifier: Apache-2.0
"""Dual learning: two opposite tasks teach each other."""
