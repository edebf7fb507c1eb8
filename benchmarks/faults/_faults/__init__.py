# SPDX-License-Identifier: Apache-2.0
"""The parts of `faults.py`: the program that is trained, its hosts, the storm, and what the books say."""
