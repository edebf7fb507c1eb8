# SPDX-License-Identifier: Apache-2.0
"""Orders of samples: permutations, the user's samplers, buckets, and each worker's part of them."""
