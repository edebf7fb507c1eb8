# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/seeds/peers.py` measures: the rows (`rows`, and one module for each library), the processes on their
hosts (`fleet`), a worker's counters (`counters`) and the figures (`figures`)."""
