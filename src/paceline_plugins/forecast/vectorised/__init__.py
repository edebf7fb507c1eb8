# SPDX-License-Identifier: Apache-2.0
"""Many workers of a small model as one stacked training."""
