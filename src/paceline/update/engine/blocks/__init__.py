# SPDX-License-Identifier: Apache-2.0
"""Block rules: when a block ends, the outer state, and the update of the model."""
