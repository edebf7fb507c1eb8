# SPDX-License-Identifier: Apache-2.0
"""One exchange: its header, checksum, the agreement on it, outliers, and the pipeline of its chunks."""
