# SPDX-License-Identifier: Apache-2.0
"""Before you rent: the simulator, the planner and the doctor."""
