# SPDX-License-Identifier: Apache-2.0
"""The plugins of the wheel: each stands on the public face of paceline alone."""
