# SPDX-License-Identifier: Apache-2.0
"""Gradient rules: hooks in the backward pass, buckets, and the update of the optimizer's gradients."""
