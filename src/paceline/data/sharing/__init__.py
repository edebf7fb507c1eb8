# SPDX-License-Identifier: Apache-2.0
"""`run.share`: each worker iterates over its part of a loader."""
