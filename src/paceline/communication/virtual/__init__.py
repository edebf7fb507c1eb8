# SPDX-License-Identifier: Apache-2.0
"""N workers in one process, one at a time, on a simulated clock."""
