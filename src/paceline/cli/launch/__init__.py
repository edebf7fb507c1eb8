# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop workers."""
