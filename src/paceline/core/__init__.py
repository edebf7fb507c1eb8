# SPDX-License-Identifier: Apache-2.0
"""Definitions that all other folders use: the world, flat tensors, optimizer state, random generators, state as JSON,
this process's clock, threads and disk; `kernels` has Triton's."""
