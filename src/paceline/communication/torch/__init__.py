# SPDX-License-Identifier: Apache-2.0
"""torch.distributed as the carrier: gloo, NCCL, MPI."""
