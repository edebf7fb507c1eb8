# SPDX-License-Identifier: Apache-2.0
"""The transport over MPI, by mpi4py: where a cluster's fabric is reached by its MPI only."""
