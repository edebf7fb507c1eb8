# SPDX-License-Identifier: Apache-2.0
"""Start workers, watch them, and end them."""
