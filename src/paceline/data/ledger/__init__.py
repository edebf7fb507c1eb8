# SPDX-License-Identifier: Apache-2.0
"""Which samples of an epoch were given to whom and are done: every sample once."""
