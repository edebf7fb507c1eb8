# SPDX-License-Identifier: Apache-2.0
"""Pages with figures from the logs of a run."""
