# SPDX-License-Identifier: Apache-2.0
"""Ways in: programs without a line of ours (`zero`), and other frameworks (`adapters`)."""
