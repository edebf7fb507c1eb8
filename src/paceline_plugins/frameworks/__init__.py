# SPDX-License-Identifier: Apache-2.0
"""Trainers of other frameworks."""
