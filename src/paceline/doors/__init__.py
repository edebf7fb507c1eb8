# SPDX-License-Identifier: Apache-2.0
"""Ways in: adapters for frameworks, and for programs without a torch optimizer."""
