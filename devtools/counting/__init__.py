# SPDX-License-Identifier: Apache-2.0
"""Models whose weights name the samples that entered them, trained by real processes that are killed."""
