# SPDX-License-Identifier: Apache-2.0
"""The engine of workers that exchange together: its parts, its steps, and its shutdown."""
