# SPDX-License-Identifier: Apache-2.0
"""The engine of rules whose workers exchange together, and its hooks on the user's optimizer."""
