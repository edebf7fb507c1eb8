# SPDX-License-Identifier: Apache-2.0
"""Loader processes: how they make batches and send them to the training process."""
