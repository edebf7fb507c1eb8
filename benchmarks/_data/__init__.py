# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of data distribution: plain functions that give dictionaries."""
