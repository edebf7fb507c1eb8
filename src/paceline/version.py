# SPDX-License-Identifier: Apache-2.0
"""The version, alone, so that every floor can name it."""

__version__ = "0.1.0"
