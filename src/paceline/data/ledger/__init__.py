# SPDX-License-Identifier: Apache-2.0
"""Which samples of an epoch are free, leased or done, so that each sample is trained on once."""
