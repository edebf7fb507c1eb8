# SPDX-License-Identifier: Apache-2.0
"""Engines of rules whose workers exchange together, and what they share with the user's optimizer."""
