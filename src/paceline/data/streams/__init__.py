# SPDX-License-Identifier: Apache-2.0
"""Streamed data sets: their shards, formats and readers."""
