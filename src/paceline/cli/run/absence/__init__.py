# SPDX-License-Identifier: Apache-2.0
"""When the workers of a host leave an elastic run: a notice that the host will be taken, a time of day, or its user."""
