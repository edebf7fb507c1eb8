# SPDX-License-Identifier: Apache-2.0
"""`run.share`: a loader as each worker iterates over its part."""
