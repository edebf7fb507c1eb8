# SPDX-License-Identifier: Apache-2.0
"""Loader processes: what they make, and how it comes to the training process."""
